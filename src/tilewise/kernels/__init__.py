"""The table of native tile kernels, their packed weight layout, and a slow NumPy reference of each.

Native code does the work (native/kernels). This package says what each kernel is called, what its operands
are and what it costs. `kernels.isa` runs a single kernel; it alone loads the native module, so the table
works without one.
"""

from tilewise.kernels.packing import PANEL_ROWS, pack_weight, packed_elements, padded_columns, unpack_weight
from tilewise.kernels.reference import REFERENCES, UPDATE_STEPS
from tilewise.kernels.table import KERNELS, IntSpec, KernelSpec, OperandSpec, kernel_spec
from tilewise.kernels.update_program import find_update_problem

__all__ = [
    "KERNELS",
    "PANEL_ROWS",
    "REFERENCES",
    "UPDATE_STEPS",
    "IntSpec",
    "KernelSpec",
    "OperandSpec",
    "find_update_problem",
    "kernel_spec",
    "pack_weight",
    "packed_elements",
    "padded_columns",
    "unpack_weight",
]
