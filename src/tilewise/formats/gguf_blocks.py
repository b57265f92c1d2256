"""The numbers that blocks of GGUF files mean, in NumPy.

Each function takes blocks, uint8 `[blocks, bytes]`, and returns float32 `[blocks, elements]`. The
arithmetic is that of ggml's `dequantize_row_*` (ggml-quants.c): the same operations in fp32 in the
same order, so results have the same bits.

Blocks of 32 elements have one scale. Blocks of 256 elements (the K formats and `iq4_xs`) are
divided into groups of 16 or 32 elements, each with a small integer that multiplies the scale of the
block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "q2_k",
    "q3_k",
    "q4_0",
    "q4_1",
    "q4_k",
    "q5_0",
    "q5_1",
    "q5_k",
    "q6_k",
    "q8_0",
]

Blocks = NDArray[Any]

_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # ggml's kvalues_iq4nl
_E2M1 = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32
)  # twice the numbers of FP4; scales are half as large


def q8_0(blocks: Blocks) -> Blocks:
    """A scale `f16`, then 32 codes of 8 bits."""
    codes: Blocks = blocks[:, 2:].view(np.int8).astype(np.float32)
    return np.asarray(_halves(blocks, 0) * codes)


def q4_0(blocks: Blocks) -> Blocks:
    """A scale `f16`, then 32 codes of 4 bits: 16 low halves of bytes, then 16 high ones."""
    return np.asarray(_halves(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8))


def q4_1(blocks: Blocks) -> Blocks:
    """A scale and a minimum `f16`, then codes as in `q4_0`."""
    return np.asarray(_halves(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _halves(blocks, 2))


def q5_0(blocks: Blocks) -> Blocks:
    """A scale `f16`, the fifth bits of 32 codes, then their other bits as in `q4_0`."""
    return np.asarray(_halves(blocks, 0) * (_codes_of_five(blocks[:, 2:6], blocks[:, 6:]) - 16))


def q5_1(blocks: Blocks) -> Blocks:
    """A scale and a minimum `f16`, then codes as in `q5_0`."""
    codes = _codes_of_five(blocks[:, 4:8], blocks[:, 8:])
    return np.asarray(_halves(blocks, 0) * codes + _halves(blocks, 2))


def q2_k(blocks: Blocks) -> Blocks:
    """16 bytes with a factor of the scale and one of the minimum, 256 codes of 2 bits, a scale and a
    minimum `f16`.
    """
    scales, codes = blocks[:, :16], _bits(blocks[:, 16:80], (0, 2, 4, 6), 3)
    factor = _halves(blocks, 80) * (scales & 15).astype(np.float32)
    minimum = _halves(blocks, 82) * (scales >> 4).astype(np.float32)
    groups = codes.reshape(len(blocks), 16, 16).astype(np.float32)
    return _flat(factor[:, :, None] * groups - minimum[:, :, None])


def q3_k(blocks: Blocks) -> Blocks:
    """The third bits of 256 codes, their other bits, 16 factors of 6 bits, a scale `f16`."""
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    lower = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    upper = np.concatenate([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (lower | upper << 4).astype(np.float32) - 32
    factor = _halves(blocks, 108) * scales
    third = _bits(high, range(8), 1).astype(np.float32)
    codes = _bits(low, (0, 2, 4, 6), 3).astype(np.float32) - 4 * (1 - third)  # a bit of 0 subtracts 4
    return _flat(factor[:, :, None] * codes.reshape(len(blocks), 16, 16))


def q4_k(blocks: Blocks) -> Blocks:
    """A scale and a minimum `f16`, 8 factors of each in 6 bits, 256 codes of 4 bits."""
    factor, minimum = _factors(blocks)
    codes = _bits(blocks[:, 16:], (0, 4), 15).reshape(len(blocks), 8, 32).astype(np.float32)
    return _flat(factor * codes - minimum)


def q5_k(blocks: Blocks) -> Blocks:
    """As `q4_k`, with the fifth bits of the codes before their other bits."""
    factor, minimum = _factors(blocks)
    fifth = _bits(blocks[:, 16:48], range(8), 1)
    codes = _bits(blocks[:, 48:], (0, 4), 15) | fifth << 4
    return _flat(factor * codes.reshape(len(blocks), 8, 32).astype(np.float32) - minimum)


def q6_k(blocks: Blocks) -> Blocks:
    """The low 4 bits of 256 codes, their high 2 bits, 16 factors of 8 bits, a scale `f16`."""
    low = _bits(blocks[:, :128], (0, 4), 15, width=64)
    high = _bits(blocks[:, 128:192], (0, 2, 4, 6), 3)
    factor = _halves(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    codes = (low | high << 4).astype(np.float32) - 32
    return _flat(factor[:, :, None] * codes.reshape(len(blocks), 16, 16))


def iq4_nl(blocks: Blocks) -> Blocks:
    """A scale `f16`, then 32 codes of 4 bits as in `q4_0`, which choose from 16 numbers."""
    return np.asarray(_halves(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:])])


def iq4_xs(blocks: Blocks) -> Blocks:
    """A scale `f16`, the high 2 bits of 8 factors, their low 4 bits, 256 codes as in `iq4_nl`."""
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(len(blocks), 8)
    factor = _halves(blocks, 0) * ((lower | upper << 4).astype(np.float32) - 32)
    codes = _bits(blocks[:, 8:], (0, 4), 15, width=16).reshape(len(blocks), 8, 32)
    return _flat(factor[:, :, None] * _IQ4[codes])


def mxfp4(blocks: Blocks) -> Blocks:
    """An exponent of 8 bits, then 32 numbers of 4 bits (E2M1) in the order of `q4_0`."""
    exponent = blocks[:, :1].astype(np.uint32)
    # half of two to the power of the exponent; the two smallest are subnormal
    subnormal = np.uint32(0x00200000) << np.minimum(exponent, 1)
    scale = np.where(exponent < 2, subnormal, (np.maximum(exponent, 1) - 1) << 23)
    return np.asarray(scale.astype(np.uint32).view(np.float32) * _E2M1[_nibbles(blocks[:, 1:])])


def _halves(blocks: Blocks, at: int) -> Blocks:
    """The f16 numbers at a byte of each block, in fp32 `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(codes: Blocks) -> Blocks:
    """Low halves of all bytes of a block, then high halves."""
    return np.concatenate([codes & 15, codes >> 4], axis=1)


def _codes_of_five(fifth: Blocks, others: Blocks) -> Blocks:
    """Codes of 5 bits in fp32, from a bit field and nibbles."""
    high = np.unpackbits(np.ascontiguousarray(fifth), axis=1, bitorder="little")
    return np.asarray((_nibbles(others) | high << 4).astype(np.float32))


def _bits(codes: Blocks, shifts: Any, mask: int, width: int = 32) -> Blocks:
    """Fields of bytes in ggml's order: of each `width` bytes the field at the first shift, then the
    field at the next shift.
    """
    places = np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    return np.asarray(codes.reshape(len(codes), -1, 1, width) >> places & mask).reshape(len(codes), -1)


def _factors(blocks: Blocks) -> tuple[Blocks, Blocks]:
    """Scale and minimum of the 8 groups of `q4_k` and `q5_k`, each `[blocks, 8, 1]`."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    factor = _halves(blocks, 0) * scales.astype(np.float32)
    minimum = _halves(blocks, 2) * minima.astype(np.float32)
    return factor[:, :, None], minimum[:, :, None]


def _flat(groups: Blocks) -> Blocks:
    return np.asarray(groups.reshape(len(groups), -1))
