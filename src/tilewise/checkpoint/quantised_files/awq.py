"""AWQ: codes and zero points packed along n, in the order 0, 2, 4, 6, 1, 3, 5, 7 within a word.

Tensors of a layer with n outputs and k inputs, and G groups along k:

| tensor | dtype | shape |
|---|---|---|
| `qweight` | int32 | `[k, n / 8]` |
| `qzeros` | int32 | `[G, n / 8]` |
| `scales` | f16, bf16 or f32 | `[G, n]` |

The weight is `scales[g, n] * (code - zero)`. Only the layout `gemm` of 4 bits is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import AliasChoices, Field

from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.quantised_files.layers import (
    SCALES,
    Array,
    GroupedWeight,
    Layer,
    Method,
    group_of_columns,
    layers,
)
from tilewise.checkpoint.tensors import FileTensor

__all__ = ["Awq"]

_INT32 = (np.dtype(np.int32),)
_PER_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each place in a word, lowest bits first


class Awq(Method):
    """The settings of AWQ that decide what its tensors mean.

    Attributes:
        bits: bits of a code.
        group_size: inputs of a group; -1: all.
        version: the layout of packed codes.
        zero_point: whether there are zero points.
    """

    quant_method: Literal["awq"]
    bits: Literal[4] = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(validation_alias=AliasChoices("group_size", "q_group_size"), ge=-1, le=1 << 20)
    version: Literal["gemm", "GEMM"] = "gemm"
    zero_point: Literal[True] = True

    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def unsupported(self) -> str | None:
        """See `Method`."""
        return "group_size 0" if self.group_size == 0 else None

    def weights(self, files: Mapping[str, FileTensor]) -> Iterator[QuantisedTensor]:
        """See `Method`."""
        return (self._weight(layer) for layer in layers(files, "qweight"))

    def _weight(self, layer: Layer) -> QuantisedTensor:
        packed = layer.tensor("qweight", _INT32, (None, None))
        k, n = packed.shape[0], packed.shape[1] * _PER_WORD
        stored_scales = layer.tensor("scales", SCALES, (None, n))
        num_groups = stored_scales.shape[0]
        stored_zeros = layer.tensor("qzeros", _INT32, (num_groups, packed.shape[1]))
        group = group_of_columns(layer, k, num_groups, self.group_size)

        def scales(first: int, count: int) -> Array:
            return np.asarray(stored_scales.columns(first, count).read().T)

        def codes(first: int, count: int) -> Array:
            return _rows(packed, first, count)

        def zeros(first: int, count: int) -> Array:
            return _rows(stored_zeros, first, count)

        scale = stored_scales.dtype
        return GroupedWeight(layer, packed, (n, k), "int4", scale, group, codes, scales, zeros).tensor()


def _rows(packed: FileTensor, first: int, count: int) -> Array:
    """Columns of a packed tensor as rows, uint8 `[count, rows of the tensor]`."""
    begin, end = first // _PER_WORD, -(-(first + count) // _PER_WORD)
    words = np.ascontiguousarray(packed.columns(begin, end - begin).read().T)
    in_bytes = words.view(np.uint8).reshape(*words.shape, 4)
    rows = np.empty((len(words), _PER_WORD, words.shape[1]), np.uint8)
    for place, output in enumerate(_ORDER):
        byte = in_bytes[..., place // 2]
        rows[:, output] = byte >> 4 if place % 2 else byte & 15
    return rows.reshape(-1, words.shape[1])[first - begin * _PER_WORD :][:count]
