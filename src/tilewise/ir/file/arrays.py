"""Arrays in files: dtype name, sizes, and the elements in row-major order, uncompressed."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import DTYPES
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable

__all__ = ["ArrayForm", "array_form", "array_named"]

_MAX_DIMS = 32  # the limit of NumPy 1
_MAX_SIZE = 1 << 40


class ArrayForm(NamedTuple):
    """Dtype and sizes of an array in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its elements in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def of(self, content: bytes) -> NDArray[Any]:
        """The read-only array with these bytes."""
        return np.frombuffer(content, DTYPES[self.dtype].numpy).reshape(self.shape)


def array_named(array: NDArray[Any]) -> tuple[str, list[int]]:
    """The dtype name and the sizes of an array."""
    name = next(name for name, kind in DTYPES.items() if kind.numpy == array.dtype)
    return name, list(array.shape)


def array_form(name: object, shape: object) -> ArrayForm:
    """The form that a file gives for an array.

    Raises:
        Unreadable: the dtype name is unknown, or the sizes are not a list of integers.
    """
    sizes = shape if isinstance(shape, list) and len(shape) <= _MAX_DIMS else [-1]
    is_named = isinstance(name, str) and name in DTYPES
    if not is_named or not all(type(s) is int and 0 <= s < _MAX_SIZE for s in sizes):
        raise Unreadable(f"an array must have a dtype and a shape; got {shown([name, shape])}")
    return ArrayForm(str(name), tuple(sizes))
