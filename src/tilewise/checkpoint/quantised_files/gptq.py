"""GPTQ: codes packed along k, `[k, n]`; zero points packed along n; a group index per input.

Tensors of a layer with n outputs and k inputs, `bits` per code, and G groups along k:

| tensor | dtype | shape |
|---|---|---|
| `qweight` | int32 | `[k * bits / 32, n]` |
| `qzeros` | int32 | `[G, n * bits / 32]` |
| `scales` | f16, bf16 or f32 | `[G, n]` |
| `g_idx` | int32 | `[k]`, the group of each input; may be missing |

The weight is `scales[g, n] * (code - zero)`. `gptq` files (version 1) store `zero - 1`, `gptq_v2`
files store the zero point. With act-order (`desc_act`), inputs of a group may be scattered. Such a
layer stays in blocks if each aligned run of at least 32 inputs is in one group, as with
`static_groups`. Otherwise a block of adjacent inputs would need several scales, and reordered columns
would need reordered activations; the weight is then expanded to bf16, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

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
    unpack_words,
)
from tilewise.checkpoint.tensors import FileTensor

__all__ = ["Gptq"]

_INT32 = (np.dtype(np.int32),)


class Gptq(Method):
    """The settings of GPTQ that decide what its tensors mean.

    Attributes:
        bits: bits of a code.
        group_size: inputs of a group; -1: all.
        checkpoint_format: how zero points are stored.
        dynamic: exceptions from the settings for some layers, which must only exclude layers.
        is_marlin_format: whether codes are in the order of a GPU kernel.
    """

    quant_method: Literal["gptq"]
    bits: Literal[4, 8]
    group_size: int = Field(ge=-1, le=1 << 20)
    checkpoint_format: Literal["gptq", "gptq_v2"] = Field(
        "gptq", validation_alias=AliasChoices("checkpoint_format", "format")
    )
    dynamic: dict[str, Any] | None = None
    is_marlin_format: Literal[False] = False

    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")

    def unsupported(self) -> str | None:
        """See `Method`."""
        if self.group_size == 0:
            return "group_size 0"
        changed = [
            name for name, values in (self.dynamic or {}).items() if values and not name.startswith("-:")
        ]
        return f"dynamic settings for {changed[0]}" if changed else None

    def weights(self, files: Mapping[str, FileTensor]) -> Iterator[QuantisedTensor]:
        """See `Method`."""
        return (self._weight(layer) for layer in layers(files, "qweight"))

    def _weight(self, layer: Layer) -> QuantisedTensor:
        per_word = 32 // self.bits
        packed = layer.tensor("qweight", _INT32, (None, None))
        k, n = packed.shape[0] * per_word, packed.shape[1]
        stored_scales = layer.tensor("scales", SCALES, (None, n))
        num_groups = stored_scales.shape[0]
        stored_zeros = layer.tensor("qzeros", _INT32, (num_groups, -(-n // per_word)))
        group = group_of_columns(layer, k, num_groups, self.group_size)
        added = 1 if self.checkpoint_format == "gptq" else 0

        def codes(first: int, count: int) -> Array:
            return unpack_words(packed.columns(first, count).read().T, self.bits)

        def scales(first: int, count: int) -> Array:
            return np.asarray(stored_scales.columns(first, count).read().T)

        def zeros(first: int, count: int) -> Array:
            begin, end = first // per_word, -(-(first + count) // per_word)
            words = stored_zeros.columns(begin, end - begin).read()
            unpacked = unpack_words(words, self.bits).astype(np.uint16) + added
            return np.asarray(unpacked[:, first - begin * per_word :][:, :count].T)

        group_of = None
        if "g_idx" in layer:
            group_of = layer.tensor("g_idx", _INT32, (k,)).read()
            if group_of.min() < 0 or group_of.max() >= num_groups:
                rule, got = (
                    f"must have g_idx from 0 to {num_groups - 1}",
                    f"{group_of.min()} to {group_of.max()}",
                )
                layer.invalid(rule, got, "download the files again")
            if np.array_equal(group_of, np.arange(k) // group):
                group_of = None
        scale, element = stored_scales.dtype, f"int{self.bits}"
        return GroupedWeight(
            layer, packed, (n, k), element, scale, group, codes, scales, zeros, group_of
        ).tensor()
