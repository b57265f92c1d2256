"""Rounds weights to blocks of 8 or 4 bits: symmetric, to nearest.

Blocks of 32 elements are Q8_0 and Q4_0 of llama.cpp, with the bytes that it writes itself. Larger
blocks use the same formulas in the formats `int8_g64` to `int4_g512` (`group_blocks`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.formats.group_blocks import GROUP_FORMATS
from tilewise.formats.weight_format import WeightFormat, weight_format

__all__ = ["quantise", "quantised_format"]

Array = NDArray[Any]
_LLAMA = {8: "q8_0", 4: "q4_0"}
_RUN = 32
_CHUNK_ELEMENTS = 1 << 15  # whose temporaries stay in a core's cache


def quantised_format(bits: int, block: int) -> WeightFormat:
    """The format that weights are rounded to.

    Args:
        bits: 8 or 4.
        block: elements of a block along k: 32, 64, 128, 256 or 512.
    """
    return weight_format(_LLAMA[bits] if block == _RUN else f"int{bits}_g{block}")


def quantise(values: Array, bits: int, block: int) -> NDArray[np.uint8]:
    """Rows in blocks of `quantised_format(bits, block)`.

    A block that has a number that is not finite, or a scale beyond f16, gets a scale that is not
    finite, so that loading rejects it.

    Args:
        values: float32 `[n, k]`; k is a multiple of the block.
        bits: 8 or 4.
        block: elements of a block.

    Returns:
        uint8 `[n, row_bytes(k)]`.
    """
    kind, (n, k) = quantised_format(bits, block), values.shape
    rows = np.empty((n, kind.row_bytes(k)), np.uint8)
    step = max(1, _CHUNK_ELEMENTS // max(1, k))
    for first in range(0, n, step):
        block_rows = np.ascontiguousarray(values[first : first + step])
        rows[first : first + step] = _quantised(block_rows, kind, bits, block)
    return rows


def _quantised(values: Array, kind: WeightFormat, bits: int, block: int) -> Array:
    n, k = values.shape
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        codes, scales = (_int8 if bits == 8 else _int4)(values.reshape(-1, block))
        scales = scales.astype(np.float16)
    if block != _RUN:
        unsigned = codes.view(np.uint8) ^ np.uint8(128) if bits == 8 else codes
        shape = (n, k // block)
        return GROUP_FORMATS[kind.name].pack(unsigned.reshape(n, k), scales.reshape(shape), 1 << (bits - 1))
    if bits == 4:
        codes = codes[:, : _RUN // 2] | codes[:, _RUN // 2 :] << 4
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1).reshape(n, -1)


def _int8(blocks: Array) -> tuple[Array, Array]:
    """Codes -127 to 127, int8, and scales, fp32 `[blocks, 1]`."""
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    magnitude -= whole
    whole += magnitude >= 0.5  # ties away from zero, as roundf
    return np.copysign(whole, scaled, out=whole).astype(np.int8), scales


def _int4(blocks: Array) -> tuple[Array, Array]:
    """Codes 0 to 15 with zero point 8, uint8, and scales, fp32 `[blocks, 1]`.

    The largest number by magnitude becomes -8 times the scale, which may be negative.
    """
    place = np.abs(blocks).argmax(axis=1)[:, None]
    scales = np.take_along_axis(blocks, place, axis=1) / np.float32(-8)
    inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    scaled = blocks * inverse
    scaled += np.float32(8.5)
    return np.minimum(scaled.astype(np.uint8), 15), scales
