"""Formats of blocks with one scale each, for the codes of quantised safetensors files.

A format has three parameters: the element, the number of elements of a block along k, and the type
of the scale. Its name is `ELEMENT_gBLOCK`, with `_bf16` or `_f32` if the scale is not f16:
`int4_g128`, `int8_g32_bf16`, `fp8_e4m3_g128_f32`. A block is little-endian and has no padding:

| part | bytes | in |
|---|---|---|
| scale | 2 (f16, bf16) or 4 (f32) | all |
| zero point, u8 | 1 | `int4`, `int8` |
| codes | 1/2 per element (`int4`), else 1 | all |

- `int4`: codes 0 to 15. Each run of 32 elements takes 16 bytes: byte i has element i in its low half
  and element i + 16 in its high half, as in `q4_0`. A symmetric weight has zero point 8.
- `int8`: codes 0 to 255, one byte each, in order. A symmetric weight has zero point 128.
- `fp8_e4m3`: numbers of one sign bit, 4 bits of exponent (bias 7) and 3 of mantissa, one byte each,
  in order. 0x7f and 0xff are NaN; there is no infinity.

The format `bf16` is for weights that no block expresses, because adjacent elements have different
scales: blocks of one element, its number in bf16.

The number of an integer element is `scale * (code - zero point)`, of an fp8 element `scale * code`,
in fp32. With a scale of 16 bits both are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_SIZES", "FORMATS", "GROUP_FORMATS", "GroupBlocks", "block_size", "group_blocks"]

Array = NDArray[Any]
BLOCK_SIZES = (32, 64, 128, 256, 512)
_BITS = {"int4": 4, "int8": 8, "fp8_e4m3": 8}
_SCALES: Mapping[str, Any] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}
_RUN = 32  # elements of a run of 4-bit codes


@dataclass(frozen=True)
class GroupBlocks:
    """A format of this module.

    Attributes:
        element: `int4`, `int8` or `fp8_e4m3`.
        block: elements of a block, along k.
        scale: type of the scale: `f16`, `bf16` or `f32`.
    """

    element: str
    block: int
    scale: str

    @property
    def name(self) -> str:
        """The name of the format."""
        suffix = "" if self.scale == "f16" else f"_{self.scale}"
        return f"{self.element}_g{self.block}{suffix}"

    @property
    def has_zero(self) -> bool:
        """Whether a block has a zero point."""
        return self.element != "fp8_e4m3"

    @property
    def codes_begin(self) -> int:
        """The first byte of the codes in a block."""
        return int(_SCALES[self.scale].itemsize) + self.has_zero

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.codes_begin + self.block * _BITS[self.element] // 8

    def values(self, blocks: Array) -> Array:
        """The numbers of blocks, from uint8 `[blocks, block_bytes]` to float32 `[blocks, block]`."""
        kind = _SCALES[self.scale]
        scales = np.ascontiguousarray(blocks[:, : kind.itemsize]).view(kind).astype(np.float32)
        codes = blocks[:, self.codes_begin :]
        if not self.has_zero:
            numbers = np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            return np.asarray(scales * numbers)
        if self.element == "int4":
            runs = codes.reshape(len(codes), -1, _RUN // 2)
            codes = np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(codes), -1)
        zeros = blocks[:, kind.itemsize : kind.itemsize + 1].astype(np.float32)
        return np.asarray(scales * (codes.astype(np.float32) - zeros))

    def pack(self, codes: Array, scales: Array, zeros: Array | int | None = None) -> NDArray[np.uint8]:
        """Rows of blocks.

        Args:
            codes: uint8 `[n, k]`; k is a multiple of the block. Of fp8, the bytes.
            scales: `[n, k / block]`, of the type of this format.
            zeros: zero points 0 to 255, `[n, k / block]` or one number; None for fp8.

        Returns:
            uint8 `[n, k / block * block_bytes]`.
        """
        n, k = codes.shape
        kind = _SCALES[self.scale]
        assert scales.dtype == kind, (scales.dtype, self.name)
        rows = np.empty((n, k // self.block, self.block_bytes), np.uint8)
        shape = (n, k // self.block, kind.itemsize)
        rows[..., : kind.itemsize] = np.ascontiguousarray(scales).view(np.uint8).reshape(shape)
        if zeros is not None:
            rows[..., kind.itemsize] = zeros
        if self.element == "int4":
            runs = codes.reshape(n, k // self.block, -1, 2, _RUN // 2)
            codes = runs[..., 0, :] | runs[..., 1, :] << 4
        rows[..., self.codes_begin :] = codes.reshape(n, k // self.block, -1)
        return rows.reshape(n, -1)


GROUP_FORMATS: Mapping[str, GroupBlocks] = {
    made.name: made for made in (GroupBlocks(*kind) for kind in product(_BITS, BLOCK_SIZES, _SCALES))
}
"""Every format of this module, by name."""


def _bf16(blocks: Array) -> Array:
    """The numbers of blocks `[blocks, 2]` of the format `bf16`."""
    return np.asarray(np.ascontiguousarray(blocks).view(_SCALES["bf16"]).astype(np.float32))


FORMATS: Mapping[str, tuple[int, int, Callable[[Array], Array]]] = {
    **{name: (one.block, one.block_bytes, one.values) for name, one in GROUP_FORMATS.items()},
    "bf16": (1, 2, _bf16),
}
"""Their rows of the table of formats: elements and bytes of a block, and its numbers."""


def block_size(k: int, group: int) -> int | None:
    """The largest block that divides both rows of k elements and their groups; None if none does.

    A group may end with the row before it is complete. A scale per row is a group of k elements. Its
    repetition in blocks of 256 or 512 costs less than 2.5 percent of 4-bit codes.
    """
    return max((size for size in BLOCK_SIZES if k % size == 0 and group % size == 0), default=None)


def group_blocks(element: str, block: int, scale: np.dtype[Any]) -> GroupBlocks:
    """The format of an element, a block and a type of scale, all of which must exist."""
    name = next(name for name, kind in _SCALES.items() if kind == scale)
    return GROUP_FORMATS[GroupBlocks(element, block, name).name]
