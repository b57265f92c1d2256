"""The numbers that blocks of GGUF files mean, in NumPy.

Each function takes blocks, uint8 `[blocks, bytes]`, and returns float32 `[blocks, elements]`. The
arithmetic is that of ggml's `dequantize_row_*` (ggml-quants.c): the same operations in fp32 in the
same order, so results have the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["q4_0", "q4_1", "q8_0"]

Blocks = NDArray[Any]


def q8_0(blocks: Blocks) -> Blocks:
    """A scale `f16`, then 32 codes of 8 bits."""
    codes: Blocks = blocks[:, 2:].view(np.int8).astype(np.float32)
    return np.asarray(_halves(blocks, 0) * codes)


def q4_0(blocks: Blocks) -> NDArray[Any]:
    """A scale `f16`, then 32 codes of 4 bits: 16 low halves of bytes, then 16 high ones."""
    return np.asarray(_halves(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8))


def q4_1(blocks: Blocks) -> NDArray[Any]:
    """A scale and a minimum `f16`, then codes as in `q4_0`."""
    return np.asarray(_halves(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _halves(blocks, 2))


def _halves(blocks: Blocks, at: int) -> NDArray[Any]:
    """The f16 numbers at a byte of each block, in fp32 `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(codes: Blocks) -> NDArray[Any]:
    """Low halves of all bytes of a block, then high halves."""
    return np.concatenate([codes & 15, codes >> 4], axis=1)
