"""Reads rectangles of files into the memory of devices: the Python interface of native/weights.

Each byte is read once with `pread`. While it is in the cache, it is converted (to nearest even),
packed into panels (blocks of 32 rows) and checked. The session decides which rectangles are read
into which parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewise import _native
from tilewise.core import PlanError
from tilewise.core.dtypes import dtype as dtype_named

__all__ = [
    "Destination",
    "Outcome",
    "Part",
    "Rectangle",
    "read_weights",
    "store_rows",
    "store_weight",
    "stored_dtype",
]

_STORED = {
    np.dtype(np.float32): "f32",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float16): "f16",
    np.dtype(np.float64): "f64",
}


class Rectangle(NamedTuple):
    """Rows of a file.

    Attributes:
        file: a descriptor.
        begin: position of the first element in the file, in bytes.
        row_bytes: bytes from one row to the next.
        rows: number of rows.
        cols: elements per row.
        dtype: `f32`, `bf16`, `f16` or `f64`.
        is_transposed: whether the file's rows are columns of the parts.
    """

    file: int
    begin: int
    row_bytes: int
    rows: int
    cols: int
    dtype: str
    is_transposed: bool = False


class Part(NamedTuple):
    """A device's part of a weight.

    Attributes:
        memory: the part's bytes, and nothing else.
        dtype: `f32` or `bf16`.
        is_packed: whether the part is stored in panels (`kernels.packing`) and not row by row.
        rows: number of rows.
        cols: elements per row.
    """

    memory: NDArray[np.uint8]
    dtype: str
    is_packed: bool
    rows: int
    cols: int


class Destination(NamedTuple):
    """Some columns of a rectangle's rows, and where they are written.

    Attributes:
        part: a device's part.
        row: first row in the part; a multiple of 32 if the part is packed.
        col: first column in the part; even if the part is packed.
        first_col: first column of the rectangle.
        num_cols: number of columns.
    """

    part: Part
    row: int
    col: int
    first_col: int
    num_cols: int


class Outcome(NamedTuple):
    """The result of reading a rectangle; reading ends at the first fault.

    Attributes:
        bytes_read: bytes read from the file.
        is_finite: whether all values are finite, also after conversion.
        is_whole: whether the file contained the whole rectangle.
        system_error: the system's error number, or 0.
    """

    bytes_read: int
    is_finite: bool
    is_whole: bool
    system_error: int


def stored_dtype(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype for rectangles; None if tensors of this dtype cannot be read."""
    return _STORED.get(dtype)


def read_weights(rectangle: Rectangle, into: Sequence[Destination], *, isa: str = "") -> Outcome:
    """Read a rectangle once for all its destinations. The GIL is released meanwhile.

    Args:
        rectangle: the rows of the file.
        into: the destinations: a weight and its master, for example, or the columns of several
            devices.
        isa: a level of `isa_levels()`; empty: the one in use.

    Raises:
        PlanError: the rectangle does not fit the parts.
    """
    return Outcome(*_native.weights.read(rectangle, into, isa))


def store_rows(matrix: NDArray[Any], into: Sequence[Destination], *, isa: str = "") -> bool:
    """Convert and pack rows of an array into parts. Returns whether all converted values are
    finite.

    Args:
        matrix: 2-D array. If rectangles cannot have its dtype, it is converted to the first part's
            dtype.
        into: the destinations: a weight and its master, for example.
        isa: a level of `isa_levels()`; empty: the one in use.

    Raises:
        PlanError: the rows do not fit the parts.
    """
    if matrix.dtype not in _STORED:
        matrix = matrix.astype(dtype_named(into[0].part.dtype).numpy)
    if not matrix.flags.aligned or matrix.strides[1] != matrix.itemsize or matrix.strides[0] < 0:
        matrix = matrix.copy(order="C")
    return bool(_native.weights.store(matrix.view(np.uint8), _STORED[matrix.dtype], into, isa))


def store_weight(matrix: NDArray[Any], part: Part, *, isa: str = "") -> bool:
    """Convert and pack an array into a part of its shape. Returns whether all converted values are
    finite.

    Args:
        matrix: 2-D array. If rectangles cannot have its dtype, it is converted to the part's dtype.
        part: a device's part.
        isa: a level of `isa_levels()`; empty: the one in use.

    Raises:
        PlanError: the shapes differ.
    """
    if matrix.shape != (part.rows, part.cols):
        raise PlanError(
            f"[kernels.store_weight] shapes must agree; got {matrix.shape} for {(part.rows, part.cols)}; reshape it"
        )
    return store_rows(matrix, [Destination(part, 0, 0, 0, part.cols)], isa=isa)
