"""`Buffer`: memory that is registered with a runtime, and `Region`: a rectangular part of a buffer.

A handle is the runtime's name for a buffer. This module makes handles of arrays, and defines how
regions look in Python. native/bind/tasks_regions.cc converts a NumPy index to a box (a range per
dimension, with strides in bytes). Memory that is not contiguous, and boxes of more than four
dimensions, are rejected. The runtime orders tasks by their accesses to buffers (docs/runtime.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tilewise._native.tasks import BufferBase, OpenRuntime, Region, TileGrid
from tilewise.core.validation import Validator, shown

__all__ = [
    "MAX_BYTES",
    "Buffer",
    "Region",
    "TileGrid",
    "array_of",
    "array_of_region",
    "dtype_of",
    "iterate_grid",
    "shape_of",
    "text_of_region",
    "type_of",
]

_validate = Validator("runtime")

MAX_DIMS = 4
MAX_BYTES = (1 << 63) - 1
TYPES = {  # of the C interface (`pto_type`), by NumPy's name
    "u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "u8": 6, "i8": 7, "f2": 8, "f4": 10, "f8": 11, "c8": 12,
    "c16": 13, "b1": 14,
}  # fmt: skip
BF16 = 9
OTHER = 15

Array = NDArray[Any]


def array_of(source: object) -> Array:
    """The memory of an array, or of anything with the buffer protocol, as a C-contiguous array that shares it."""
    try:
        array: Array = source if isinstance(source, np.ndarray) else np.asarray(memoryview(source))  # type: ignore[arg-type]
    # the last two: formats that NumPy lacks
    except (TypeError, ValueError, NotImplementedError, BufferError):
        _validate.invalid(
            "register",
            "memory must be an array or offer the buffer protocol",
            shown(source),
            "pass numpy.asarray(x), and keep what it returns",
        )
    _validate.without_mask("register", "memory", array)
    if not array.flags.c_contiguous or array.nbytes == 0 or array.dtype.hasobject:
        _validate.invalid(
            "register",
            "a buffer must be contiguous memory without Python objects",
            f"shape {array.shape}, strides {array.strides}, dtype {array.dtype}",
            "pass numpy.ascontiguousarray(x)",
        )
    return array


class Buffer(BufferBase):
    """Memory that tasks work on. A buffer is made by `Runtime.register`, by `Runtime.alloc` or as
    the output of a task.

    `buffer[0:32, 32:64]` is a region of the buffer, indexed like the array. Tasks on regions that
    do not overlap run in parallel. Registered memory is kept alive until `Runtime.unregister`.
    Memory allocated by the runtime is valid until its scope ends; using it later is an error.
    """

    def __init__(
        self,
        native: OpenRuntime,
        handle: int,
        array: Array | None,
        shape: tuple[int, ...] = (),
        dtype: DTypeLike = np.uint8,
    ) -> None:
        self._array = array
        self.dtype: np.dtype[Any] = array.dtype if array is not None else np.dtype(dtype)
        self._grids: dict[tuple[int, ...], TileGrid] = {}
        super().__init__(
            native, handle, shape if array is None else array.shape, self.dtype.itemsize, type_of(self.dtype)
        )

    @property
    def array(self) -> Array:
        """The memory as an array. This does not wait for tasks; use `Runtime.read` for a finished
        value.
        """
        if self._array is not None:
            return self._array
        native: Any = self.native
        return self.view_at(native.address(self.handle))

    def view_at(self, address: int) -> Array:
        """An array of this shape at another address: where the runtime allocated an output or a
        partial value of a reduction.
        """
        native: Any = self.native
        flat: Any = native.view(address, self.num_bytes)
        array: Array = flat.view(self.dtype).reshape(self.shape)
        return array

    def region(self, offset: int, size: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Region:
        """A region in bytes, from byte `offset` on: per dimension, `size` steps of `stride` bytes.
        The last dimension is contiguous.

        Args:
            offset: bytes from the start of the buffer.
            size: steps per dimension; the last one counts bytes.
            stride: per dimension, bytes from step to step. The largest stride is first, and the
                last is 1. None if the region has one dimension.

        Raises:
            ConfigError: the region does not lie inside the buffer, or is invalid.
        """
        offset = _validate.integer("region", "offset", offset, 0, MAX_BYTES)
        sizes = _whole_numbers("size", size)
        strides = _whole_numbers("stride", (1,) if stride is None else stride)
        long = [step for count, step in zip(sizes, strides) if count > 1]
        if len(strides) != len(sizes) or not 1 <= len(sizes) <= MAX_DIMS or strides[-1] != 1:
            _validate.invalid(
                "region",
                f"a region must have as many strides as sizes, at most {MAX_DIMS}, and the last stride 1",
                f"size {shown(sizes)} and stride {shown(strides)}",
                "correct it",
            )
        if long != sorted(long, reverse=True):
            _validate.invalid("region", "strides must descend", shown(strides), "put the largest first")
        return self.byte_region(offset, sizes, strides)

    def tiles(self, *sizes: int) -> TileGrid:
        """The buffer divided into tiles. `grid[i, j]` is the region of one tile.

        The grid is cached per sizes, and so is each of its regions. In a loop over tiles, getting a
        region costs a fraction of submitting a task.

        Args:
            sizes: elements of a tile per dimension, for one or more leading dimensions. Further
                dimensions are not divided. Tiles at the end are smaller if a size does not divide
                its dimension.

        Raises:
            ConfigError: there are more sizes than dimensions, or more than 2**24 tiles.
        """
        tile = tuple(_validate.integer("tiles", "a tile's size", size, 1, MAX_BYTES) for size in sizes)
        return self._grids.get(tile) or self._grids.setdefault(tile, self.make_grid(tile))

    def __repr__(self) -> str:
        return f"Buffer({self.handle & 0xFFFFFFFF}, shape={self.shape}, dtype={self.dtype})"


def array_of_region(region: Region) -> Array:
    """Implements `Region.array`; called by the native class."""
    buffer: Any = region.buffer
    flat = np.asarray(buffer.array).reshape(-1).view(np.uint8)
    return np.ndarray(region.shape, region.dtype, flat, region.offset, region.strides)


def text_of_region(region: Region) -> str:
    """Implements `repr(region)`: the buffer and the index expression."""
    buffer: Any = region.buffer
    if region.index is None:
        box = f".region({region.offset}, {region.shape}, {region.strides})"
    else:
        entries = region.index if isinstance(region.index, tuple) else (region.index,)
        box = f"[{', '.join(_written(entry) for entry in entries) or '()'}]"
    return f"Region(Buffer({buffer.handle & 0xFFFFFFFF}){box}, shape={region.shape}, dtype={region.dtype})"


def iterate_grid(grid: TileGrid) -> Iterator[Region]:
    """Implements `iter(grid)`, which yields the regions of all tiles. The last index changes
    fastest.
    """
    return (grid[place] for place in np.ndindex(grid.shape))


def _written(entry: Any) -> str:
    if entry is Ellipsis:
        return "..."
    if not isinstance(entry, slice):
        return str(entry)
    bounds = ["" if bound is None else str(bound) for bound in (entry.start, entry.stop, entry.step)]
    return ":".join(bounds if bounds[2] else bounds[:2])


def _whole_numbers(name: str, values: Any) -> list[int]:
    return [_validate.integer("region", name, entry, 1, MAX_BYTES) for entry in values]


def type_of(dtype: np.dtype[Any]) -> int:
    """The element type of the C interface (`pto_type`)."""
    if dtype.name == "bfloat16":  # of the package ml_dtypes
        return BF16
    return TYPES.get(dtype.str[1:], OTHER) if dtype.isnative else OTHER


def shape_of(call: str, value: Any) -> tuple[int, ...]:
    """The sizes of an array, from a positive integer or a sequence of positive integers."""
    sizes = value if isinstance(value, Sequence) and not isinstance(value, bytes) else (value,)
    return tuple(_validate.integer(call, "every size of a shape", size, 1, MAX_BYTES) for size in sizes)


def dtype_of(call: str, value: DTypeLike, sizes: Sequence[int]) -> np.dtype[Any]:
    """The type of an array's elements. It must not contain Python objects, and the size of the
    whole array must fit in 63 bits.
    """
    kind = np.dtype(value)
    if kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
        _validate.invalid(
            call, "elements must be plain memory of one byte or more", f"dtype {kind}", "choose another dtype"
        )
    if math.prod(sizes) * kind.itemsize > MAX_BYTES:
        _validate.invalid(
            call,
            "an array must have less than 2**63 bytes",
            f"shape {tuple(sizes)} of {kind}",
            "make it smaller",
        )
    return kind
