"""FP8 with scales of blocks, rows or whole tensors, as DeepSeek and Qwen publish their weights.

A layer has `weight` of dtype F8_E4M3, `[n, k]`, and one tensor of scales in f32, bf16 or f16. It is
named `weight_scale_inv` or `weight_scale`, and both are factors of the weight. Its shape decides which
elements a scale belongs to:

| shape | a scale belongs to |
|---|---|
| `[]`, `[1]` or `[1, 1]` | the whole weight |
| `[n, 1]` or `[n]` | a row |
| `[n / B, k / B']`, rounded up | a block of `weight_block_size`, `[B, B']` |

Scales of activations (`input_scale`) are not used, because activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import ml_dtypes
import numpy as np
from pydantic import Field

from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.quantised_files.layers import SCALES, Array, GroupedWeight, Layer, Method, layers
from tilewise.checkpoint.tensors import FileTensor

__all__ = ["ACTIVATION_PARTS", "FP8", "Fp8", "scaled_weight"]

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
ACTIVATION_PARTS = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
)
_SCALE_PARTS = ("weight_scale_inv", "weight_scale")
_Size = Annotated[int, Field(ge=1, le=1 << 20)]


class Fp8(Method):
    """The settings of FP8 files that decide what their tensors mean.

    Attributes:
        weight_block_size: outputs and inputs of a block that shares a scale; None: per row or tensor.
    """

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3"] = "e4m3"
    weight_block_size: Annotated[list[_Size], Field(min_length=2, max_length=2)] | None = None

    parts: ClassVar[tuple[str, ...]] = (*_SCALE_PARTS, *ACTIVATION_PARTS)

    def weights(self, files: Mapping[str, FileTensor]) -> Iterator[QuantisedTensor]:
        """See `Method`."""
        rows, columns = self.weight_block_size or (0, 0)
        for layer in layers(files, "weight"):
            if files[f"{layer.name}.weight"].dtype == FP8:
                yield scaled_weight(layer, "fp8_e4m3", (rows, columns))


def scaled_weight(layer: Layer, element: str, block: tuple[int, int]) -> QuantisedTensor:
    """A weight with one byte per element, and scales.

    Args:
        layer: with `weight` and a tensor of scales.
        element: `fp8_e4m3`, or `int8` for signed codes.
        block: rows and columns of a block that shares a scale; (0, 0): blocks are not allowed.

    Raises:
        CheckpointError: the tensors contradict each other.
    """
    kind = FP8 if element == "fp8_e4m3" else np.dtype(np.int8)
    weight = layer.tensor("weight", (kind,), (None, None))
    n, k = weight.shape
    part = next((name for name in _SCALE_PARTS if name in layer), _SCALE_PARTS[0])
    stored = layer.tensor(part, SCALES)
    flipped = 128 if element == "int8" else 0  # from signed codes to codes with zero point 128

    def codes(first: int, count: int) -> Array:
        return np.asarray(weight.rows(first, count).read().view(np.uint8) ^ np.uint8(flipped))

    rows, columns = block
    if stored.shape in ((), (1,), (1, 1)):
        group = k

        def scales(first: int, count: int) -> Array:
            return np.broadcast_to(stored.read().reshape(1, 1), (count, 1))
    elif stored.shape in ((n,), (n, 1)):
        group = k

        def scales(first: int, count: int) -> Array:
            return stored.rows(first, count).read().reshape(count, 1)
    else:
        if not rows:
            layer.invalid(
                f"must have {part} for the tensor or for its {n} rows", str(list(stored.shape)), _ADVICE
            )
        layer.tensor(part, SCALES, (-(-n // rows), -(-k // columns)))
        group = columns

        def scales(first: int, count: int) -> Array:
            begin, end = first // rows, -(-(first + count) // rows)
            tiles = stored.rows(begin, end - begin).read()
            return np.asarray(tiles[np.arange(first, first + count) // rows - begin])

    return GroupedWeight(layer, weight, (n, k), element, stored.dtype, group, codes, scales).tensor()


_ADVICE = "check quantization_config in config.json"
