"""Checks the tensors that a training checkpoint is made of, and makes parts of whole tensors.

Names and shapes that could not be read back from a file, and parts that do not cover their tensor,
are rejected before a byte is read or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.boxes import Box, misfit
from tilewise.checkpoint.header import MAX_DIMS, MAX_SIZE, is_storable
from tilewise.checkpoint.tensors import FileTensor, LazyTensor, PartedTensor, TensorPart
from tilewise.core import CheckpointError
from tilewise.core.validation import Validator, shown
from tilewise.ir.graph import METADATA

__all__ = ["make_parts"]

_validate = Validator("checkpoint", CheckpointError)


def make_parts(
    tensors: Mapping[str, NDArray[Any] | FileTensor | PartedTensor], num_devices: int
) -> dict[str, PartedTensor]:
    """Tensors in parts that can be stored in files. A whole tensor becomes one part, which belongs
    to the first device.

    Raises:
        CheckpointError: the argument is not a mapping of names to tensors; a name, dtype or shape
            cannot be stored in safetensors; or parts do not cover their tensor.
    """
    parted: dict[str, PartedTensor] = {}
    for name, array in _validate.mapping("save_checkpoint", "tensors", tensors, "arrays").items():
        _check_name(name)
        tensor = array
        if isinstance(array, (np.ndarray, FileTensor)):
            part = TensorPart(Box.whole(array.shape), array, 0)
            tensor = PartedTensor(array.shape, array.dtype, (part,))
        if not _is_of_parts(tensor) or not is_storable(tensor.dtype) or not _is_small(tensor):
            _validate.invalid(
                "save_checkpoint",
                f"tensors are arrays of numbers that safetensors can hold, of at most {MAX_DIMS} dims",
                f"{_in_words(array)} for {shown(name)}",
                "convert it",
            )
        _validate.without_mask("save_checkpoint", shown(name), *(part.values for part in tensor.parts))
        _check_parts(name, tensor, num_devices)
        parted[name] = tensor
    return parted


def _in_words(value: Any) -> str:
    is_array = isinstance(value, (np.ndarray, FileTensor))
    return f"{value.dtype} {list(value.shape)}" if is_array else shown(value)


def _check_name(name: str) -> None:
    try:
        is_name = name.encode("utf-8") != METADATA.encode("utf-8")
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        _validate.invalid(
            "save_checkpoint",
            f"a tensor's name must be text in UTF-8 other than {METADATA!r}, which safetensors reserves",
            shown(name),
            "choose another name",
        )


def _is_of_parts(tensor: object) -> TypeGuard[PartedTensor]:
    """Whether an object is a valid tensor in parts."""
    return (
        isinstance(tensor, PartedTensor)
        and isinstance(tensor.dtype, np.dtype)
        and isinstance(tensor.shape, tuple)
        and all(_is_integer(size) and size >= 0 for size in tensor.shape)
        and isinstance(tensor.parts, (tuple, list))
        and all(
            isinstance(part, TensorPart)
            and isinstance(part.box, Box)
            and isinstance(part.values, (np.ndarray, FileTensor, LazyTensor))
            and _is_integer(part.device)
            for part in tensor.parts
        )
    )


def _is_small(tensor: PartedTensor) -> bool:
    """Whether a tensor's shape fits in a header, even if the tensor has no elements."""
    places = prod(max(1, int(size)) for size in tensor.shape)
    return len(tensor.shape) <= MAX_DIMS and places * tensor.dtype.itemsize < MAX_SIZE


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_parts(name: str, tensor: PartedTensor, num_devices: int) -> None:
    devices = [part.device for part in tensor.parts]
    wrong = misfit(tensor.shape, [part.box for part in tensor.parts])
    has_values = all(
        (part.values.shape, part.values.dtype) == (part.box.sizes, tensor.dtype) for part in tensor.parts
    )
    is_placed = len({*devices}) == len(devices) and {*devices} <= {*range(num_devices)}
    if wrong is not None or not has_values or not is_placed:
        _validate.invalid(
            "save_checkpoint",
            f"parts of a tensor are of different devices among {num_devices}, and hold each element once",
            f"{wrong.words if wrong else [(p.device, p.values.shape) for p in tensor.parts]} for {shown(name)}",
            "copy the state of one model, and give the state the axes of that model's mesh",
        )
