"""Buffers of tasks: memory that the runtime knows, and boxes of it.

Owns the way from an array to a handle and from a NumPy index to a strided box in bytes. Refuses memory that is not
contiguous, and boxes with more than four dimensions, reversed or picked by lists. The runtime orders tasks by what they
do to buffers; see docs/runtime.md.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tilewise._native.tasks import Core, Operand
from tilewise.runtime import checks

__all__ = ["Buffer", "Region", "array_of"]

MAX_DIMS = 4

Array = NDArray[Any]
Box = tuple[int, list[int], list[int]]


def array_of(source: object) -> Array:
    """The memory of an array, or of anything with the buffer protocol, as a C-contiguous array that shares it."""
    # The last two that are caught: formats that NumPy lacks.
    try:
        array: Array = source if isinstance(source, np.ndarray) else np.asarray(memoryview(source))  # type: ignore[arg-type]
    except (TypeError, ValueError, NotImplementedError, BufferError):
        checks.refuse(
            "register",
            "memory must be an array or offer the buffer protocol",
            checks.shown(source),
            "pass numpy.asarray(x), and keep what it returns",
        )
    if not array.flags.c_contiguous or array.nbytes == 0 or array.dtype.hasobject:
        checks.refuse(
            "register",
            "a buffer must be contiguous memory without Python objects",
            f"shape {array.shape}, strides {array.strides}, dtype {array.dtype}",
            "pass numpy.ascontiguousarray(x)",
        )
    return array


class Buffer(Operand):
    """Memory that tasks work on; made by `Runtime.register`, `Runtime.alloc` or as the output of a task.

    `buffer[0:32, 32:64]` is a box of it, indexed like the array; tasks on boxes that do not overlap run in parallel.
    Registered memory is held until `Runtime.unregister`. Memory of the runtime's own lives as long as its scope:
    afterwards its use is an error.
    """

    def __init__(
        self,
        core: Core,
        handle: int,
        array: Array | None,
        shape: tuple[int, ...] = (),
        dtype: DTypeLike = np.uint8,
    ) -> None:
        super().__init__(core, handle)
        self._core = core
        self._array = array
        self.shape = array.shape if array is not None else shape
        self.dtype: np.dtype[Any] = array.dtype if array is not None else np.dtype(dtype)

    @property
    def array(self) -> Array:
        """The memory as an array. Does not wait: for a finished value use `Runtime.read`."""
        if self._array is not None:
            return self._array
        return self.view_at(self._core.address(self.handle))

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def view_at(self, address: int) -> Array:
        """An array of this shape elsewhere: where the runtime put an output or a partial of a reduction."""
        flat: Any = self._core.view(address, self.num_bytes)
        array: Array = flat.view(self.dtype).reshape(self.shape)
        return array

    def __getitem__(self, index: Any) -> Region:
        """A box of the buffer, by a NumPy index of integers and slices."""
        return Region(self, index)

    def region(self, offset: int, size: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Region:
        """A box in bytes: `size` steps of `stride` bytes from byte `offset`; the last dimension is contiguous.

        Args:
            offset: bytes from the start of the buffer.
            size: steps per dimension; the last one counts bytes.
            stride: bytes from step to step, the largest first, the last one 1; None: one dimension.
        """
        offset = checks.integer("region", "offset", offset, 0, checks.MAX_BYTES)
        sizes = _whole_numbers("size", size)
        strides = _whole_numbers("stride", (1,) if stride is None else stride)
        if len(strides) != len(sizes) or len(sizes) > MAX_DIMS:
            checks.refuse(
                "region",
                f"a region must have as many strides as sizes, at most {MAX_DIMS}",
                f"size {sizes} and stride {strides}",
                "correct it",
            )
        return Region(self, None, (offset, sizes, strides))

    def __repr__(self) -> str:
        return f"Buffer({self.handle & 0xFFFFFFFF}, shape={self.shape}, dtype={self.dtype})"


class Region(Operand):
    """A strided box of a buffer. Tasks get the address of its first byte, Python kernels its array."""

    def __init__(self, buffer: Buffer, index: Any, box: Box | None = None) -> None:
        self.buffer = buffer
        self._core = buffer._core
        self._index = index
        super().__init__(buffer._core, buffer.handle, box if box is not None else _box(buffer, index))
        self._box = box

    @property
    def array(self) -> Array:
        """The box as an array that shares the buffer's memory."""
        if self._box is None:
            view: Array = self.buffer.array[self._index]
            return (
                view if isinstance(view, np.ndarray) else self.buffer.array[(*_as_tuple(self._index), None)]
            )
        offset, size, stride = self._box
        flat = self.buffer.array.reshape(-1).view(np.uint8)[offset:]
        return np.lib.stride_tricks.as_strided(flat, tuple(size), tuple(stride))


def _whole_numbers(name: str, values: Any) -> list[int]:
    entries = checks.sequence("region", name, values, "integers")
    return [checks.integer("region", name, entry, 0, checks.MAX_BYTES) for entry in entries]


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _box(buffer: Buffer, index: Any) -> Box:
    """Bytes and strides of a NumPy index. Integers keep their dimension, so that all boxes of a buffer are alike."""
    entries = list(_as_tuple(index))
    if any(entry is Ellipsis for entry in entries):
        at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        entries[at : at + 1] = [slice(None)] * (len(buffer.shape) - len(entries) + 1)
    entries += [slice(None)] * (len(buffer.shape) - len(entries))
    if len(entries) != len(buffer.shape):
        raise IndexError(
            f"[runtime.region] an index must have at most {len(buffer.shape)} entries; got {index}; correct it"
        )
    item = buffer.dtype.itemsize
    strides = [item * int(np.prod(buffer.shape[d + 1 :], dtype=np.int64)) for d in range(len(buffer.shape))]
    offset, sizes, steps = 0, [], []
    for entry, length, stride in zip(entries, buffer.shape, strides):
        start, count, step = _range(entry, length, index)
        offset += start * stride
        sizes.append(count)
        steps.append(step * stride)
    if steps and steps[-1] == item:
        sizes[-1], steps[-1] = sizes[-1] * item, 1
    else:
        sizes.append(item)
        steps.append(1)
    if len(sizes) > MAX_DIMS:
        checks.refuse(
            "region",
            f"a box must have at most {MAX_DIMS} dimensions",
            f"{len(sizes)} for {index}",
            "register a view with fewer dimensions, or use Buffer.region",
        )
    return offset, sizes, steps


def _range(entry: Any, length: int, index: Any) -> tuple[int, int, int]:
    """Start, count and step of one entry of an index."""
    bounds = (entry.start, entry.stop, entry.step) if isinstance(entry, slice) else (entry,)
    if all(_is_whole(bound) or (bound is None and len(bounds) == 3) for bound in bounds):
        if not isinstance(entry, slice):
            at = operator.index(entry)
            if -length <= at < length:
                return at % length, 1, 1
            raise IndexError(
                f"[runtime.region] an index must lie inside the buffer; got {at} of {length}; correct it"
            )
        if entry.step != 0:
            start, stop, step = entry.indices(length)
            count = len(range(start, stop, step))
            if step > 0 and count > 0:
                return start, count, step
    checks.refuse(
        "region",
        "a box must be made of integers and non-empty, ascending slices",
        f"{checks.shown(index)} for a length of {length}",
        "correct it",
    )


def _is_whole(bound: Any) -> bool:
    """NumPy takes True for a mask, and an array for a list of rows."""
    return hasattr(bound, "__index__") and not isinstance(bound, (bool, np.ndarray))
