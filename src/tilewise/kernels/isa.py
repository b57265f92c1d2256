"""Instruction-set levels of the native kernels, and `run`, which runs a single kernel on NumPy
arrays.

Tests, benchmarks and users call `run`; tile programs do not. bf16 arrays may be
`ml_dtypes.bfloat16`; the native code gets their 16-bit patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewise import _native

__all__ = ["Packed", "isa_in_use", "isa_levels", "isa_missing", "kernel_names", "run"]

Packed = tuple[NDArray[Any], int, int]
Tile = NDArray[Any] | Packed | None


def kernel_names() -> list[str]:
    """Names of all native kernels, sorted."""
    return list(_native.kernels.kernel_names())


def isa_levels() -> list[str]:
    """Levels that this build has and this machine can run, weakest first. On aarch64 the only level
    is `neon`.
    """
    return list(_native.kernels.isa_levels())


def isa_missing() -> list[str]:
    """Levels that this machine can run and that are better than every level of this build, weakest first.

    A build from source has the weakest level and the best one of the machine that built it. Wheels of a release have
    all levels.
    """
    return list(_native.kernels.isa_missing())


def isa_in_use() -> str:
    """The level that the runtime uses: the best one, or the one that `TILEWISE_ISA` names."""
    return str(_native.kernels.isa_in_use())


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def _operand(tile: Tile) -> object:
    if isinstance(tile, tuple):
        return (_bits(tile[0].reshape(1, -1)), tile[1], tile[2])
    return None if tile is None else _bits(tile)


def run(
    name: str,
    tiles: Sequence[Tile],
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    *,
    row_begin: int = 0,
    isa: str = "",
    repeat: int = 1,
    scratch_bytes: int = 64 << 20,
) -> None:
    """Run one kernel in place.

    Args:
        name: a kernel of `kernel_names()`.
        tiles: operands in the table's order. An operand is a 2-D array with contiguous columns,
            `(flat, rows, cols)` for a packed weight, or None if it is absent.
        ints: attributes in the table's order.
        floats: attributes in the table's order.
        row_begin: first row of the loop that this call covers.
        isa: a level of `isa_levels()`; empty for the level in use.
        repeat: number of runs without returning to Python.
        scratch_bytes: scratch memory that the kernel may use.

    Raises:
        ValueError: the kernel is unknown, the level is missing, an operand cannot be a tile, or the
            call has more or fewer operands or attributes than the kernel declares.
    """
    operands = [_operand(tile) for tile in tiles]
    _native.kernels.run(
        name,
        operands,
        ints=list(ints),
        floats=list(floats),
        row_begin=row_begin,
        isa=isa,
        repeat=repeat,
        scratch_bytes=scratch_bytes,
    )
