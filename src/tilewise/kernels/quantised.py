"""Quantised weights in memory: panels of blocks (native/kernels/quantised/format.h).

A part of a weight on a device is stored in panels of 32 rows, as other weights are. A row takes the
bytes of its blocks, rounded up to 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import _native
from tilewise.core.dtypes import DTYPES
from tilewise.formats import WeightFormat
from tilewise.ir.graph import PANEL_ROWS

__all__ = ["pack_blocks", "quantised_bytes", "unpack_blocks"]


def quantised_bytes(form: WeightFormat, rows: int, cols: int) -> int:
    """Bytes of a part with so many rows and columns."""
    return -(-rows // PANEL_ROWS) * PANEL_ROWS * (-(-form.row_bytes(cols) // 8) * 8)


def pack_blocks(
    blocks: NDArray[np.uint8],
    form: WeightFormat,
    memory: NDArray[np.uint8],
    rows: int,
    cols: int,
    *,
    row: int = 0,
    first_block: int = 0,
    isa: str = "",
) -> bool:
    """Store rows of blocks in a part. The GIL is released meanwhile.

    Args:
        blocks: uint8 `[count, bytes of a row of the whole weight]`.
        form: their format.
        memory: the part's bytes, `quantised_bytes(form, rows, cols)` of them.
        rows, cols: the part's sizes.
        row: the part's row that the first row becomes; a multiple of 32, and so is `count` unless
            it reaches the last row.
        first_block: the block of a row with which the part begins.
        isa: a level of `isa_levels()`; empty for the level in use.

    Returns:
        Whether all scales are finite.
    """
    return bool(_native.weights.store_quantised(blocks, form.name, memory, rows, cols, row, first_block, isa))


def unpack_blocks(
    memory: NDArray[np.uint8], form: WeightFormat, rows: int, cols: int, *, isa: str = ""
) -> NDArray[Any]:
    """The numbers of a part, bf16 `[rows, cols]`."""
    numbers = np.empty((rows, cols), np.uint16)
    _native.weights.read_quantised(form.name, memory, numbers, isa)
    return numbers.view(DTYPES["bf16"].numpy)
