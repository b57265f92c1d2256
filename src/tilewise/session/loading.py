"""Loads weights from files into the memory of devices: which bytes go where, and which device reads
them.

Each device reads its own parts. A part that several devices hold is read by the first of them and
copied by the `broadcast` program. So no byte is read twice in a process, except that PyTorch files
with checksums are checked first. A few threads read pieces of some MiB in file order, and convert
and pack them (`kernels.loading`). Files are not mapped. Data for offloaded tensors is collected
tensor by tensor and written to the devices' files. All names, shapes and dtypes are checked before
the first byte is read. If a value is not finite, the weights are unusable, and the instance rejects
calls until they are loaded again.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import add
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import Box, FileTensor, PartedTensor, QuantisedTensor, Tensor
from tilewise.core import get_logger
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import CheckpointError
from tilewise.core.limits import available_memory, num_cores
from tilewise.kernels.loading import (
    Destination,
    Outcome,
    Part,
    Rectangle,
    read_weights,
    store_rows,
    stored_dtype,
)
from tilewise.kernels.packing import PANEL_ROWS
from tilewise.session.inputs import as_array, is_finite
from tilewise.session.local import Place, store_blocks
from tilewise.session.tensors import NamedTensors

__all__ = ["LoadReport", "Progress", "is_loaded_from_file", "load_tensors"]

Progress = Callable[[int, int], object]
_PIECE_BYTES = 8 << 20
_MOST_THREADS = 8
_NUM_AHEAD = 2  # tensors prepared while another is written; each takes memory
_LARGE_SHARE = 2  # files larger than 1 / 2 of the free memory are dropped from the page cache after reading


@dataclass(frozen=True)
class LoadReport:
    """What loading read.

    Attributes:
        bytes_read: bytes read from files, per device; the first device that holds a part reads
            it for all.
    """

    bytes_read: tuple[int, ...]


@dataclass(frozen=True)
class _Piece:
    """What a thread reads at a time: a rectangle of a file for one device, or the columns of
    several devices; or, of a tensor in parts, some rows for one device.

    Attributes:
        name: the tensor's name in the graph.
        sources: the tensors in files that it belongs to.
        begin: byte position of its start in the first one's file.
        dtype: element type of the parts that it is written to.
        fill: reads it into them.
        num_bytes: per device, the bytes read for it.
    """

    name: str
    sources: Sequence[FileTensor | QuantisedTensor]
    begin: int
    dtype: str
    fill: Callable[[], Outcome]
    num_bytes: Mapping[int, int]

    def read(self) -> None:
        """Fill the parts.

        Raises:
            CheckpointError: the file has changed, or a value is not finite.
        """
        outcome = self.fill()
        if outcome.system_error:
            raise self.sources[0].file.unreadable(os.strerror(outcome.system_error))
        if not outcome.is_whole:
            raise self.sources[0].file.unreadable("it has become shorter")
        if not outcome.is_finite:
            tensor = self._first_not_finite()
            raise CheckpointError(
                f"[session.loading] weights must be finite in {self.dtype}; got others in "
                f"{self.name!r}, stored as {tensor.name!r} in {str(tensor.file.path)!r}; load other weights: "
                "until then the model does not run"
            )
        assert outcome.bytes_read == sum(self.num_bytes.values())

    def _first_not_finite(self) -> FileTensor | QuantisedTensor:
        """The tensor to name in the error when a value is not finite; if there are several, they
        are read again.
        """
        if len(self.sources) == 1:
            return self.sources[0]
        kind = dtype_named(self.dtype)
        return next((t for t in self.sources if not is_finite(t.read(), kind)), self.sources[0])


def load_tensors(
    tensors: NamedTensors,
    values: Mapping[str, Tensor],
    on_progress: Progress | None = None,
) -> LoadReport:
    """Write parameters and states, which were checked, to the first device that holds each part.

    Args:
        tensors: the instance's tensors.
        values: arrays, and tensors in files, whose elements are checked now.
        on_progress: called in the caller's thread after each piece with the bytes read so far and
            in total.

    Raises:
        CheckpointError: a file has changed, or a value is not finite; parts are then undefined.
    """
    pieces: list[_Piece] = []
    made: list[tuple[str, Tensor]] = []  # in memory, before they are written
    _warn_of_float16(tensors, values)
    for name, value in values.items():
        if _lies_in_file(tensors, name):
            made.append((name, value))
        elif isinstance(value, FileTensor) and is_read_in_place(tensors, name, value):
            pieces += _pieces(tensors, name, value)
        elif isinstance(value, PartedTensor) and is_read_in_place(tensors, name, value):
            pieces += _pieces_of_parts(tensors, name, value)
        elif isinstance(value, QuantisedTensor) and is_loaded_in_blocks(tensors, name, value):
            pieces += _pieces_of_blocks(tensors, name, value)
        else:
            made.append((name, value))
    bytes_read = [0] * tensors.plan.mesh.num_devices
    for name, array in _made_ahead(made):
        bytes_read[tensors.places(name)[0][0].device] += _require_finite(tensors, name, values[name], array)
        tensors.write(name, array, once=True)
    tensors.num_writes += 1
    pieces.sort(key=lambda piece: (str(piece.sources[0].file.path), piece.begin))
    in_place = _read_all(pieces, tensors.plan.mesh.num_devices, on_progress)
    return LoadReport(tuple(map(add, bytes_read, in_place)))


def _lies_in_file(tensors: NamedTensors, name: str) -> bool:
    """Whether parts of a tensor, or of its master, are in devices' files, which accept only whole
    parts.
    """
    return any(place.memory is None for places in tensors.places(name) for place in places)


def _require_finite(tensors: NamedTensors, name: str, value: Tensor, array: NDArray[Any]) -> int:
    """Reject values from files that are not finite; returns the bytes read from files."""
    if not isinstance(value, (FileTensor, PartedTensor)) or not is_read_in_place(tensors, name, value):
        return 0  # was checked before
    for dtype in {place.spec.dtype for places in tensors.places(name) for place in places}:
        if not is_finite(array, dtype):
            raise CheckpointError(
                f"[session.loading] weights must be finite in {dtype}; got others in {name!r}; load other weights: "
                "until then the model does not run"
            )
    return value.nbytes


def _made_ahead(values: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Tensors as arrays, in order. While one is written, threads make the next ones; NumPy
    generates random numbers without the GIL.
    """
    count = min(_NUM_AHEAD, len(values))
    with ThreadPoolExecutor(max(1, count), thread_name_prefix="making weights") as pool:
        conversions = deque(pool.submit(as_array, "loading", *named) for named in values[:count])
        for place, (name, _) in enumerate(values):
            array = conversions.popleft().result()
            if place + count < len(values):
                conversions.append(pool.submit(as_array, "loading", *values[place + count]))
            yield name, array


def _warn_of_float16(tensors: NamedTensors, values: Mapping[str, Tensor]) -> None:
    """Log that fp16 weights are converted: no device computes in fp16, so the model changes slightly."""
    kinds_of_files = FileTensor, PartedTensor
    stored = {n for n, t in values.items() if isinstance(t, kinds_of_files) and t.dtype == np.float16}
    kinds = Counter(tensors.plan.graph.spec(tensors.ids[name]).dtype.name for name in stored)
    for kind, count in sorted(kinds.items()):
        cost = "rounded to fewer digits" if kind == "bf16" else "exact, in twice the memory"
        get_logger("session").warning("%d tensors are stored as float16 and run as %s: %s", count, kind, cost)


def is_read_in_place(tensors: NamedTensors, name: str, value: FileTensor | PartedTensor) -> bool:
    """Whether a tensor is a vector or a matrix of a type that is converted while it is read. Others
    become arrays first, and so do parts in memory.
    """
    if isinstance(value, PartedTensor) and len(value.files) < len(value.parts):
        return False
    kinds = {place.spec.dtype.name for places in tensors.places(name) for place in places}
    return value.ndim in (1, 2) and kinds <= {"f32", "bf16"} and stored_dtype(value.dtype) is not None


def is_loaded_from_file(
    value: Tensor, tensors: NamedTensors, name: str
) -> TypeGuard[FileTensor | PartedTensor | QuantisedTensor]:
    """Whether a tensor of a file is converted while it is read, or keeps its blocks. Others become
    arrays first.
    """
    if isinstance(value, QuantisedTensor):
        return is_loaded_in_blocks(tensors, name, value)
    return isinstance(value, (FileTensor, PartedTensor)) and is_read_in_place(tensors, name, value)


def is_loaded_in_blocks(tensors: NamedTensors, name: str, value: QuantisedTensor) -> bool:
    """Whether a quantised tensor keeps its format in memory. Otherwise it is expanded."""
    return all(p.spec.format == value.format for places in tensors.places(name) for p in places)


def _pieces_of_blocks(tensors: NamedTensors, name: str, value: QuantisedTensor) -> Iterator[_Piece]:
    """The pieces of a quantised tensor: some panels of a device's part."""
    row_bytes = value.format.row_bytes(value.shape[1])
    step = max(1, _PIECE_BYTES // row_bytes // PANEL_ROWS) * PANEL_ROWS
    for (place,) in tensors.places(name):
        width = value.format.row_bytes(place.sizes[1])
        for row in range(0, place.sizes[0], step):
            count = min(step, place.sizes[0] - row)
            begin = value.begin + (place.slices[0].start + row) * row_bytes
            fill = partial(_store_blocks, value, place, row, count, count * width)
            yield _Piece(name, [value], begin, "bf16", fill, {place.device: count * width})


def _store_blocks(value: QuantisedTensor, place: Place, row: int, count: int, num_bytes: int) -> Outcome:
    assert place.memory is not None
    is_finite = store_blocks(value, place.spec, place.memory, place.slices, row, count)
    return Outcome(num_bytes, is_finite, True, 0)


def _pieces(tensors: NamedTensors, name: str, value: FileTensor) -> Iterator[_Piece]:
    """The pieces of one tensor, divided at rows of the file."""
    dtype = stored_dtype(value.dtype)
    assert dtype is not None
    item, unit = value.dtype.itemsize, 2 if value.is_transposed else PANEL_ROWS
    for run in _side_by_side([_strip(places, value) for places in tensors.places(name)]):
        (first, end), left, width = run[0].rows, run[0].cols[0], run[-1].cols[1] - run[0].cols[0]
        step = max(1, _PIECE_BYTES // max(1, width * item) // unit) * unit
        row_bytes = value.row_bytes if value.ndim == 2 else width * item
        for row in range(first, end, step):
            count = min(step, end - row)
            begin = value.begin + row * row_bytes + left * item
            at = (0, row - first) if value.is_transposed else (row - first, 0)
            num_bytes: dict[int, int] = {}
            for strip in run:
                read = count * strip.width * item
                num_bytes[strip.device] = num_bytes.get(strip.device, 0) + read
            into = [Destination(p, *at, s.cols[0] - left, s.width) for s in run for p in s.parts]
            rectangle = Rectangle(
                value.file.descriptor, begin, row_bytes, count, width, dtype, value.is_transposed
            )
            fill = partial(read_weights, rectangle, into)
            yield _Piece(name, [value], begin, into[0].part.dtype, fill, num_bytes)


def _pieces_of_parts(tensors: NamedTensors, name: str, value: PartedTensor) -> Iterator[_Piece]:
    """The pieces of a tensor in parts: whole panels of rows of what each device holds. The mesh
    that wrote the parts may have divided the tensor within a panel of this mesh, so rows are
    assembled before they are packed.
    """
    for places in tensors.places(name):
        part_box = Box(tuple(s.start for s in places[0].slices), tuple(places[0].sizes))
        into = [_part(place) for place in places]
        row_bytes = prod(part_box.sizes[1:]) * value.dtype.itemsize
        step = max(1, _PIECE_BYTES // max(1, row_bytes) // PANEL_ROWS) * PANEL_ROWS
        if value.ndim == 1:
            step = part_box.sizes[0]
        for row in range(0, part_box.sizes[0], step):
            count = min(step, part_box.sizes[0] - row)
            box = Box((part_box.begin[0] + row, *part_box.begin[1:]), (count, *part_box.sizes[1:]))
            overlapping = [part for part in value.parts if part.box.meet(box) is not None]
            sources = [part.values for part in overlapping if isinstance(part.values, FileTensor)]
            fill = partial(_join, replace(value, parts=tuple(overlapping)), box, row, into)
            yield _Piece(
                name, sources, sources[0].begin, into[0].dtype, fill, {places[0].device: count * row_bytes}
            )


def _join(tensor: PartedTensor, box: Box, row: int, into: Sequence[Part]) -> Outcome:
    """Assemble a box of a tensor, and store it from a row of the parts on."""
    values = tensor.read_box(box)
    rows = values.reshape(1, -1) if values.ndim == 1 else values
    is_finite = store_rows(rows, [Destination(part, row, 0, 0, part.cols) for part in into])
    return Outcome(values.nbytes, is_finite, True, 0)


@dataclass(frozen=True)
class _Strip:
    """A device's part of a tensor as stored in the file.

    Attributes:
        device: the device that reads it.
        rows: rows of the file, `[begin, end)`.
        cols: columns of the file, `[begin, end)`.
        parts: the destinations: a weight, and its master.
    """

    device: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    parts: Sequence[Part]

    @property
    def width(self) -> int:
        return self.cols[1] - self.cols[0]


def _strip(places: Sequence[Place], value: FileTensor) -> _Strip:
    spans = [(s.start, s.stop) for s in places[0].slices]
    rows, cols = spans if value.ndim == 2 else ((0, 1), *spans)
    if value.is_transposed:
        rows, cols = cols, rows
    return _Strip(places[0].device, rows, cols, [_part(place) for place in places])


def _part(place: Place) -> Part:
    rows, cols = place.sizes if len(place.sizes) == 2 else (1, place.sizes[0])
    assert place.memory is not None
    return Part(place.memory, place.spec.dtype.name, place.spec.storage == "packed", rows, cols)


def _side_by_side(strips: Sequence[_Strip]) -> Iterator[list[_Strip]]:
    """Strips of the same rows with adjacent columns. Devices of this process that share rows of a
    file read them together, because a system call for every row of every device would cost more.
    """
    run: list[_Strip] = []
    for strip in sorted(strips, key=lambda s: (s.rows, s.cols)):
        if run and (run[-1].rows, run[-1].cols[1]) != (strip.rows, strip.cols[0]):
            yield run
            run = []
        run.append(strip)
    yield run


def _read_all(pieces: Sequence[_Piece], num_devices: int, on_progress: Progress | None) -> tuple[int, ...]:
    """Read pieces on a few threads; returns the bytes read per device."""
    bytes_read = [0] * num_devices
    total = sum(sum(piece.num_bytes.values()) for piece in pieces)
    behind = _Behind(pieces) if total * _LARGE_SHARE > available_memory() else None
    threads = min(_MOST_THREADS, num_cores(), max(1, len(pieces)))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tilewise-load")
    try:
        running: dict[Future[None], _Piece] = {pool.submit(piece.read): piece for piece in pieces}
        for done in as_completed(running):
            piece = running[done]
            done.result()
            for device, read in piece.num_bytes.items():
                bytes_read[device] += read
            if behind is not None:
                behind.drop(piece)
            if on_progress is not None:
                on_progress(sum(bytes_read), total)
    finally:
        pool.shutdown(cancel_futures=True)
    return tuple(bytes_read)


class _Behind:
    """Returns the page cache of tensors that all devices have read to the system."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._left = Counter(self._key(tensor) for piece in pieces for tensor in piece.sources)

    @staticmethod
    def _key(tensor: FileTensor | QuantisedTensor) -> tuple[int, int, int]:
        return tensor.file.descriptor, tensor.begin, tensor.begin + tensor.extent_bytes

    def drop(self, piece: _Piece) -> None:
        """Count a piece as read; after the last one of a tensor, its pages are dropped."""
        for tensor in piece.sources:
            key = self._key(tensor)
            self._left[key] -= 1
            if self._left[key] == 0:
                descriptor, begin, end = key
                with suppress(OSError):  # the file system may not support this advice
                    os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
