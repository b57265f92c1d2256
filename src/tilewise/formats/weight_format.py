"""The table of formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.errors import ConfigError
from tilewise.core.validation import shown
from tilewise.formats import gguf_blocks, group_blocks

__all__ = ["FORMATS", "KERNEL_FORMATS", "WeightFormat", "weight_format"]


@dataclass(frozen=True)
class WeightFormat:
    """A format of quantised weights.

    Attributes:
        name: its name, for example `q4_k`.
        block: elements of a block, along k.
        block_bytes: bytes of a block.
        values: the elements of blocks in fp32: from uint8 `[blocks, block_bytes]` to float32 `[blocks, block]`.
    """

    name: str
    block: int
    block_bytes: int
    values: Callable[[NDArray[Any]], NDArray[Any]]

    @property
    def number(self) -> int:
        """Its place in `KERNEL_FORMATS`, by which kernels know it."""
        return _NUMBERS[self.name]

    @property
    def bits(self) -> float:
        """Bits per element, with scales."""
        return 8 * self.block_bytes / self.block

    @property
    def has_grouped_product(self) -> bool:
        """Whether kernels have grouped products of it (docs/numerics.md, rule 12)."""
        return self.name in _GROUPED

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k elements, which must be whole blocks."""
        assert k % self.block == 0, (self.name, k)
        return k // self.block * self.block_bytes

    def dequantise(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The elements of rows in fp32.

        Args:
            rows: uint8 `[n, row_bytes(k)]`.

        Returns:
            float32 `[n, k]`.
        """
        count, num_bytes = rows.shape
        columns = num_bytes // self.block_bytes * self.block
        if not rows.size:
            return np.zeros((count, columns), np.float32)
        blocks = np.ascontiguousarray(rows).reshape(-1, self.block_bytes)
        with np.errstate(invalid="ignore", over="ignore"):  # scales of damaged files may be infinite
            return self.values(blocks).astype(np.float32, copy=False).reshape(count, columns)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the name."""
        return (weight_format, (self.name,))


FORMATS = {
    name: WeightFormat(name, *fields)
    for name, fields in {
        "q8_0": (32, 34, gguf_blocks.q8_0),
        "q4_0": (32, 18, gguf_blocks.q4_0),
        "q4_1": (32, 20, gguf_blocks.q4_1),
        "q5_0": (32, 22, gguf_blocks.q5_0),
        "q5_1": (32, 24, gguf_blocks.q5_1),
        "q2_k": (256, 84, gguf_blocks.q2_k),
        "q3_k": (256, 110, gguf_blocks.q3_k),
        "q4_k": (256, 144, gguf_blocks.q4_k),
        "q5_k": (256, 176, gguf_blocks.q5_k),
        "q6_k": (256, 210, gguf_blocks.q6_k),
        "iq4_nl": (32, 18, gguf_blocks.iq4_nl),
        "iq4_xs": (256, 136, gguf_blocks.iq4_xs),
        "mxfp4": (32, 17, gguf_blocks.mxfp4),
        **group_blocks.FORMATS,
    }.items()
}
"""Every format by name. Those of GGUF have llama.cpp's names; `group_blocks` describes the others."""
KERNEL_FORMATS = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "mxfp4"),
    *(f"int4_g{block}{scale}" for block in (32, 64, 128) for scale in ("", "_bf16")),
    *(f"int8_g{block}{scale}" for block in (128, 512) for scale in ("", "_bf16")),
    *(f"fp8_e4m3_g{block}{scale}" for block in (128, 512) for scale in ("_bf16", "_f32")),
)
"""Formats that kernels read, in the order of native/kernels/quantised/formats.cc. Weights in other
formats are expanded to bf16 when they are loaded.
"""
_GROUPED = {  # those with codes of 4 bits
    *("q4_0", "q4_1", "q4_k", "iq4_nl", "iq4_xs", "mxfp4"),
    *(f"int4_g{block}{scale}" for block in (32, 64, 128) for scale in ("", "_bf16")),
}
_NUMBERS = {name: number for number, name in enumerate(KERNEL_FORMATS)}


def weight_format(name: str | WeightFormat) -> WeightFormat:
    """The format of this name.

    Raises:
        ConfigError: there is no such format.
    """
    if isinstance(name, WeightFormat):
        return name
    if name not in FORMATS:
        raise ConfigError(
            f"[formats] a format of weights must be one of {', '.join(FORMATS)}; got {shown(name)}; choose one of them"
        )
    return FORMATS[name]
