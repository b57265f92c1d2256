"""Quantises weights while they are loaded: rows are rounded to blocks when they are read.

Blocks are those of the whole weight, so they do not depend on which rows a device reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.stored import Stored
from tilewise.checkpoint.tensors import FileTensor
from tilewise.core.errors import ConfigError
from tilewise.core.log import get_logger
from tilewise.core.validation import Validator
from tilewise.formats.quantise import quantise, quantised_format

__all__ = ["quantise_weights"]

_validate = Validator("checkpoint", ConfigError)
_USUAL_GROUP = 32


def quantise_weights(
    weights: Mapping[str, Stored], names: Collection[str], quantization: str
) -> dict[str, Stored]:
    """Weights of files with some of them quantised, which happens when their rows are read.

    A weight whose columns are not a multiple of the group stays as it is, with one line in the log.

    Args:
        weights: by name, from `StoredWeights`.
        names: the matrices `[n, k]` to quantise.
        quantization: `int8` or `int4`, for groups of 32 along k; `int8:128` or `int4:128` for groups
            of 128.

    Raises:
        ConfigError: a weight is quantised in its file.
    """
    element, _, group = quantization.partition(":")
    bits, block = int(element.removeprefix("int")), int(group or _USUAL_GROUP)
    chosen, unchanged = dict(weights), []
    for name in names:
        tensor = weights[name]
        if not isinstance(tensor, FileTensor):
            got = (
                f"{name!r} in {tensor.format}"
                if isinstance(tensor, QuantisedTensor)
                else f"{name!r} in memory"
            )
            rule = "quantization must be of weights that files have in bf16, f16 or f32"
            _validate.invalid("quantise_weights", rule, got, "load them without quantization")
        if tensor.shape[1] % block:
            unchanged.append(name)
        else:
            chosen[name] = _quantised(tensor, bits, block)
    if unchanged:
        get_logger("checkpoint").warning(
            "%d weights stay as they are, because their inputs are not a multiple of %d; the first is %s",
            len(unchanged),
            block,
            unchanged[0],
        )
    return chosen


def _quantised(tensor: FileTensor, bits: int, block: int) -> QuantisedTensor:
    def read_blocks(first: int, count: int) -> NDArray[np.uint8]:
        with np.errstate(over="ignore"):  # of float64; an infinity is rejected when it is loaded
            rows: NDArray[Any] = tensor.rows(first, count).read().astype(np.float32)
        return quantise(np.ascontiguousarray(rows), bits, block)

    n, k = tensor.shape
    kind = quantised_format(bits, block)
    return QuantisedTensor(tensor.file, tensor.name, kind, (n, k), read_blocks, tensor.begin)
