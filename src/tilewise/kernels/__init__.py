"""The table of native tile kernels, the packed layout of weights, and a slow NumPy reference of
each kernel.

A kernel is a native function that computes one tile of a result (native/kernels). This package
describes the kernels' names, operands and costs. The modules `isa` (which runs a single kernel),
`loading` and `sampling` load the native module; the others do not.
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
