"""Kernels of users: native functions that tile programs and ops call by name, next to the kernels of
the table.

A kernel is a C function `int (*)(const tilewise_kernel_args*)` (native/include/tilewise/
tile_kernel.h), a function pointer of ctypes, or a Numba cfunc. Its declaration says what native
kernels say next to their code: operands with roles, integers and floats. So calls are checked, and
tasks are ordered, as for any kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator, shown
from tilewise.kernels.functions import address_of, require_status
from tilewise.kernels.table import IntSpec, KernelSpec, OperandSpec, is_declared, register_spec

__all__ = ["KERNEL_ARGS", "TILE", "TileKernel", "load_kernel", "tile_kernel", "user_kernel"]

TILE = np.dtype([("data", "u8"), ("rows", "i8"), ("cols", "i8"), ("stride", "i8")])
"""`tilewise_tile` as a NumPy dtype, for Numba."""
KERNEL_ARGS = np.dtype(
    [
        ("tiles", "u8"),
        ("num_tiles", "i8"),
        ("ints", "u8"),
        ("num_ints", "i8"),
        ("floats", "u8"),
        ("num_floats", "i8"),
        ("row_begin", "i8"),
        ("scratch", "u8"),
        ("scratch_bytes", "i8"),
    ]
)
"""`tilewise_kernel_args` as a NumPy dtype, for Numba."""

_DTYPES = ("f32", "bf16", "i32", "f64")
_ROLES = ("in", "out", "inout")
_SCRATCH_BYTES = 1 << 20  # of a call without a worker
_validate = Validator("kernels", PlanError)


@dataclass(frozen=True, eq=False)
class TileKernel:
    """A registered kernel of a user. Programs name it, or pass this object.

    Attributes:
        name: its name.
        spec: its operands and attributes.
        address: address of its code.
        library: path of the library and name of the symbol, by which other processes find it.
        function: keeps the code loaded.
    """

    name: str
    spec: KernelSpec
    address: int
    library: tuple[str, str] | None
    function: object

    def run(self, tiles: Sequence[NDArray[Any] | None], ints: Sequence[int], floats: Sequence[float]) -> None:
        """Call it once, on arrays in the order of the declaration.

        Raises:
            PlanError: it returned a status other than 0.
        """
        table = np.zeros(len(tiles), TILE)
        for row, tile in zip(table, tiles):
            if tile is not None:
                row["data"], (row["rows"], row["cols"]) = tile.ctypes.data, tile.shape
                row["stride"] = tile.strides[0] // tile.itemsize
        numbers, factors = np.array([*ints, 0], np.int64), np.array([*floats, 0], np.float64)
        scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        args = np.zeros(1, KERNEL_ARGS)
        args[0] = (
            table.ctypes.data,
            len(tiles),
            numbers.ctypes.data,
            len(ints),
            factors.ctypes.data,
            len(floats),
            0,
            scratch.ctypes.data,
            _SCRATCH_BYTES,
        )
        status = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.address)(args.ctypes.data)
        if status:
            raise PlanError(
                f"[kernels.{self.name}] a kernel must return 0; got status {status}; see what the kernel reports by it"
            )


_registered: dict[str, TileKernel] = {}


def tile_kernel(
    function: object,
    *,
    name: str,
    operands: Mapping[str, str],
    ints: Sequence[str] = (),
    floats: Sequence[str] = (),
) -> TileKernel:
    """Register a native function as a kernel of tile programs and ops.

    Args:
        function: `(library, symbol)`, a function pointer of ctypes, a Numba cfunc, or an address.
            Only kernels of a library run in several processes.
        name: the name in programs. A later kernel of the same name replaces it.
        operands: role of each operand, `in`, `out` or `inout`, by name, in the order in which the
            function gets the tiles; with dtypes if not all are possible: `"in f32 bf16"`.
        ints: names of its integers, in order.
        floats: names of its floats, in order.

    Raises:
        PlanError: the function is not native code, or the declaration is invalid.
    """
    _validate.text("tile_kernel", "name", name)
    if is_declared(name):
        _validate.invalid(
            "tile_kernel", "a kernel of the table keeps its name", repr(name), "choose another name"
        )
    library, code = None, function
    if isinstance(function, tuple):
        library, code = _symbol_of(*function)
    address = address_of(code)
    if address is None or not 0 < address < 1 << 64:
        _validate.invalid(
            "tile_kernel",
            "a kernel must be native code: (library, symbol), a ctypes function pointer or a Numba cfunc",
            shown(function),
            "compile it, for example with numba.cfunc",
        )
    require_status(_validate, code, 1, "int (*)(const tilewise_kernel_args* args)")
    names = [*operands, *ints, *floats]
    if len({*names}) != len(names) or not all(isinstance(n, str) and n.isidentifier() for n in names):
        _validate.invalid(
            "tile_kernel", "names of operands and attributes must be distinct", shown(names), "rename some"
        )
    spec = KernelSpec(
        name,
        (name,),
        tuple(_operand(operand, text) for operand, text in operands.items()),
        tuple(IntSpec(i) for i in ints),
        tuple(floats),
        (),
        lambda sizes: 0,
        lambda sizes: 0,
    )
    kernel = _registered[name] = TileKernel(name, spec, address, library, code)
    register_spec(spec)
    return kernel


def user_kernel(name: str) -> TileKernel | None:
    """The user's kernel of this name; None for any other name."""
    return _registered.get(name)


def load_kernel(name: str, path: str, symbol: str) -> int:
    """The address of a kernel that another process has registered by its library.

    Raises:
        PlanError: the library or the symbol is missing here.
    """
    kernel = _registered.get(name)
    if kernel is None or kernel.library != (path, symbol):
        library, code = _symbol_of(path, symbol)
        address = address_of(code)
        assert address is not None
        kernel = _registered[name] = TileKernel(name, _NO_SPEC, address, library, code)
    return kernel.address


_NO_SPEC = KernelSpec("", (), (), (), (), (), lambda sizes: 0, lambda sizes: 0)


def _symbol_of(path: Any, symbol: Any) -> tuple[tuple[str, str], object]:
    where = str(Path(_validate.path("tile_kernel", "library", path)).resolve())
    _validate.text("tile_kernel", "symbol", symbol)
    try:
        code = getattr(ctypes.CDLL(where), symbol)
    except (OSError, AttributeError) as error:
        _validate.invalid(
            "tile_kernel",
            "a library must have the kernel",
            f"{error}",
            "compile it with -shared, and export the symbol",
        )
    return (where, symbol), code


def _operand(name: str, text: object) -> OperandSpec:
    role, *dtypes = (text.split() if isinstance(text, str) else []) or [""]
    if role not in _ROLES or not {*dtypes} <= {*_DTYPES}:
        _validate.invalid(
            "tile_kernel",
            f"an operand must be {', '.join(_ROLES)}, and then dtypes of {', '.join(_DTYPES)}",
            f"{shown(text)} for {name!r}",
            'write for example "in f32"',
        )
    return OperandSpec(name, role, tuple(dtypes) or _DTYPES)
