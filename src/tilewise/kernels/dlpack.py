"""Arrays of other libraries (PyTorch, JAX, CuPy) by DLPack, without a copy.

NumPy's own DLPack has no bf16. Here bf16 arrays are NumPy arrays of `ml_dtypes.bfloat16`, as
everywhere in Tilewise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise._native.arrays import read, share_bf16
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator, shown

__all__ = ["array_of", "has_dlpack", "to_dlpack"]

_BF16 = DTYPES["bf16"].numpy
_validate = Validator("kernels", ShapeError)


def has_dlpack(value: object) -> bool:
    """Whether a value is an array of another library that shares its memory by DLPack."""
    return hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, np.generic))


def array_of(value: Any) -> NDArray[Any]:
    """A read-only NumPy array over the memory of another library's array, with its strides.

    Raises:
        PlanError: it is not in the memory of the CPU, or NumPy and Tilewise lack its element type.
        TypeError: the library does not share it, as PyTorch does not share a sparse tensor.
    """
    array: NDArray[Any]
    array, is_bf16 = read(value)
    return array.view(_BF16) if is_bf16 else array


def to_dlpack(array: NDArray[Any]) -> Any:
    """An object for `from_dlpack` of PyTorch, JAX and others, over the memory of a NumPy array.

    NumPy shares arrays of other element types itself, so they are returned as they are. An array of
    bf16 is wrapped. The memory is valid as long as the array's: a view by `get_tensor(name,
    copy=False)` until the next run.

    Args:
        array: of any shape and strides.

    Raises:
        ShapeError: it is not a NumPy array.

    Examples:
        >>> import ml_dtypes, torch
        >>> torch.from_dlpack(to_dlpack(np.ones(2, ml_dtypes.bfloat16)))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    if not isinstance(array, np.ndarray):
        _validate.invalid(
            "to_dlpack", "an array must be a NumPy array", shown(array), "pass what get_tensor returned"
        )
    return share_bf16(array.view(np.uint16), array.flags.writeable) if array.dtype == _BF16 else array
