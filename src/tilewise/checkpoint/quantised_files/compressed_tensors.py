"""Files of the compressed-tensors library: integers packed along k, or fp8 and int8 with scales.

Tensors of a layer in the format `pack-quantized`, with n outputs, k inputs and G groups along k:

| tensor | dtype | shape |
|---|---|---|
| `weight_packed` | int32 | `[n, k * bits / 32]`, rounded up; a code is the number plus 2^(bits - 1) |
| `weight_scale` | f16, bf16 or f32 | `[n, G]`, or `[1]` |
| `weight_zero_point` | int32 packed along n, `[n * bits / 32, G]`, or int8 `[n, G]` | if not symmetric |
| `weight_shape` | int64 | `[2]`, n and k |
| `weight_g_idx` | int32 | `[k]`; may be missing |

The formats `float-quantized`, `int-quantized` and `naive-quantized` have `weight` in fp8 or int8 and
`weight_scale`, which `fp8.py` describes. Settings of activations are not used, because activations
are not quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.quantised_files.fp8 import ACTIVATION_PARTS, FP8, scaled_weight
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

__all__ = ["CompressedTensors"]

_INT8, _INT32, _INT64 = (np.dtype(kind) for kind in (np.int8, np.int32, np.int64))
_PACKED = "pack-quantized"
_FORMATS = (_PACKED, "float-quantized", "int-quantized", "naive-quantized")
_Size = Annotated[int, Field(ge=1, le=1 << 20)]


class _Weights(BaseModel):
    """How a group of layers has its weights."""

    model_config = ConfigDict(strict=True, extra="ignore")

    num_bits: Literal[4, 8] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    group_size: int | None = Field(None, ge=-1, le=1 << 20)
    block_structure: Annotated[list[_Size], Field(min_length=2, max_length=2)] | None = None

    @property
    def element(self) -> str:
        """The element of the blocks."""
        return f"int{self.num_bits}" if self.type == "int" else "fp8_e4m3"

    @property
    def group(self) -> int:
        """Inputs of a group; -1 for all."""
        return -1 if self.group_size is None or self.strategy in ("channel", "tensor") else self.group_size


class _Group(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    weights: _Weights | None = None
    format: str | None = None


class CompressedTensors(Method):
    """The settings of compressed-tensors that decide what its tensors mean.

    Attributes:
        format: how codes are stored.
        config_groups: settings of groups of layers. A layer belongs to one of those that its tensors fit.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    quant_method: Literal["compressed-tensors"]
    format: str = _PACKED
    config_groups: Annotated[dict[str, _Group], Field(min_length=1, max_length=64)]
    quantization_status: Literal["compressed"] = "compressed"
    sparsity_config: dict[str, Any] | None = None

    parts: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        *ACTIVATION_PARTS,
    )

    def unsupported(self) -> str | None:
        """See `Method`."""
        of_groups = {group.format or self.format for group in self.config_groups.values()}
        if self.format != "mixed-precision":
            of_groups.add(self.format)
        if odd := sorted(of_groups - {*_FORMATS}):
            return f"format {odd[0]}"
        if (self.sparsity_config or {}).get("format", "dense") != "dense":
            return "sparsity_config"
        for group in self.config_groups.values():
            weights = group.weights
            if weights is not None and weights.type == "float" and weights.num_bits != 8:
                return f"floating-point weights of {weights.num_bits} bits"
            if weights is not None and weights.group_size == 0:
                return "group_size 0"
        return None

    def weights(self, files: Mapping[str, FileTensor]) -> Iterator[QuantisedTensor]:
        """See `Method`."""
        for layer in layers(files, "weight_packed"):
            yield self._packed(layer)
        for layer in layers(files, "weight"):
            if (dtype := files[f"{layer.name}.weight"].dtype) in (FP8, _INT8):
                yield self._plain(layer, "fp8_e4m3" if dtype == FP8 else "int8")

    def _plain(self, layer: Layer, element: str) -> QuantisedTensor:
        """A weight with one byte per element."""
        if element == "int8" and "weight_zero_point" in layer:
            kind = layer.tensor("weight_zero_point", (_INT8,))
            if np.any(kind.read()):
                layer.invalid(
                    "must be symmetric in this format", "zero points", "give pack-quantized weights"
                )
        for weights in self._settings():
            if weights.element == element and weights.block_structure is not None:
                rows, columns = weights.block_structure
                return scaled_weight(layer, element, (rows, columns))
        return scaled_weight(layer, element, (0, 0))

    def _settings(self) -> Iterator[_Weights]:
        return (group.weights for group in self.config_groups.values() if group.weights is not None)

    def _packed(self, layer: Layer) -> QuantisedTensor:
        packed = layer.tensor("weight_packed", (_INT32,), (None, None))
        n, words = packed.shape
        shape = layer.tensor("weight_shape", (_INT64, _INT32), (2,)).read()
        k = int(shape[1])
        if int(shape[0]) != n or k < 1:
            layer.invalid(f"must have weight_shape with its {n} outputs", str(shape.tolist()), _ADVICE)
        stored = layer.tensor("weight_scale", SCALES)
        settings = [one for one in self._settings() if one.type == "int"]
        bits = next((b.num_bits for b in settings if -(-k * b.num_bits // 32) == words), None)
        if bits is None:
            layer.invalid(f"must have the num_bits of its {k} inputs", f"{words} words per row", _ADVICE)
        if stored.shape in ((), (1,)) and n > 1:
            group, num_groups = k, 1

            def scales(first: int, count: int) -> Array:
                return np.broadcast_to(stored.read().reshape(1, 1), (count, 1))
        else:
            num_groups = layer.tensor("weight_scale", SCALES, (n, None)).shape[1]
            group = self._group(layer, k, num_groups, [one for one in settings if one.num_bits == bits])

            def scales(first: int, count: int) -> Array:
                return stored.rows(first, count).read()

        def codes(first: int, count: int) -> Array:
            return unpack_words(packed.rows(first, count).read(), bits)[:, :k]

        group_of = None
        if "weight_g_idx" in layer:
            group_of = layer.tensor("weight_g_idx", (_INT32,), (k,)).read()
            if group_of.max() < 0 or np.array_equal(group_of, np.arange(k) // group):  # -1: not used
                group_of = None
            elif group_of.min() < 0 or group_of.max() >= num_groups:
                rule, got = (
                    f"must have weight_g_idx below {num_groups}",
                    f"{group_of.min()} to {group_of.max()}",
                )
                layer.invalid(rule, got, _ADVICE)
        zeros = self._zeros(layer, n, num_groups, bits)
        return GroupedWeight(
            layer, packed, (n, k), f"int{bits}", stored.dtype, group, codes, scales, zeros, group_of
        ).tensor()

    def _group(self, layer: Layer, k: int, num_groups: int, settings: list[_Weights]) -> int:
        """Inputs of a group, of the settings that fit the number of groups."""
        sizes = [one.group for one in settings]
        fitting = next(
            (size for size in sizes if -(-k // (k if size == -1 else size)) == num_groups), sizes[0]
        )
        return group_of_columns(layer, k, num_groups, fitting)

    def _zeros(self, layer: Layer, n: int, num_groups: int, bits: int) -> Any:
        """Reads the zero points of rows, as codes; None for a symmetric weight."""
        if "weight_zero_point" not in layer:
            return None
        stored = layer.tensor("weight_zero_point", (_INT8, _INT32))
        per_word, middle = 32 // bits, 1 << (bits - 1)
        if stored.dtype == _INT8:
            layer.tensor("weight_zero_point", (_INT8,), (n, num_groups))

            def plain(first: int, count: int) -> Array:
                return stored.rows(first, count).read().astype(np.int16) + np.int16(middle)

            return plain
        layer.tensor("weight_zero_point", (_INT32,), (-(-n // per_word), num_groups))

        def zeros(first: int, count: int) -> Array:
            begin, end = first // per_word, -(-(first + count) // per_word)
            words = stored.rows(begin, end - begin).read()
            return np.asarray(unpack_words(words.T, bits)[:, first - begin * per_word :][:, :count].T)

        return zeros


_ADVICE = "check quantization_config in config.json"
