"""The table of native tile kernels, the packed layout of weights, and a slow NumPy reference of
each kernel.

The kernels are native (native/kernels). This package describes their names, operands and costs.
Only `kernels.isa`, which runs a single kernel, loads the native module.
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
