"""Tensors whose values are not in memory as one array: they are in files, consist of several parts,
or are fetched by a function when they are needed.

`WeightsFile` opens a safetensors file. Its `FileTensor`s know their place in the file and are read
with `pread` on request, row by row if needed. If the file has become shorter, reading raises an
error (with a memory map, a signal would end the process). A `PartedTensor` consists of several
parts in files or arrays, and reads a box from the parts that contain it. A `LazyTensor` is a tensor
to be written, whose values a function fetches. NumPy accepts all of these as arrays. Files that
break a rule of the format (`checkpoint.header`) are rejected.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.boxes import Box
from tilewise.checkpoint.header import TensorEntry, dtype_of_name, header_end, parse_header
from tilewise.checkpoint.open_file import OpenFile, RowsOfFile
from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.core import CheckpointError
from tilewise.core.validation import Validator, shown
from tilewise.files.reading import Unreadable, open_regular

__all__ = [
    "Checksum",
    "FileTensor",
    "LazyTensor",
    "PartedTensor",
    "Tensor",
    "TensorPart",
    "WeightsFile",
    "cast_tensors",
    "read_array",
]

_validate = Validator("checkpoint", CheckpointError)
_CHUNK_BYTES = 4 << 20
_FOREIGN = {
    b"PK\x03\x04": "an archive of torch.save",
    b"\x80": "pickled objects, or a state dict of a torch before 1.6, which may run any code when they are opened",
    b"GGUF": "a GGUF file",
}


class Checksum:
    """The CRC-32 of a range of a file that contains tensors. It is verified once, before the first
    of these tensors is read.

    Args:
        file: the open file.
        begin: first byte of the range.
        size: size of the range in bytes.
        crc: the expected value.
    """

    def __init__(self, file: OpenFile, begin: int, size: int, crc: int) -> None:
        self._file, self._range, self._crc = file, (begin, size), crc
        self._is_verified = False
        self._lock = threading.Lock()

    def verify(self, name: str) -> None:
        """Compare the range with its checksum.

        Args:
            name: name of a tensor in the range, for the message.

        Raises:
            CheckpointError: the checksum differs, or the range no longer exists.
        """
        with self._lock:
            if self._is_verified:
                return
            (begin, size), crc = self._range, 0
            buffer = memoryview(bytearray(min(size, _CHUNK_BYTES)))
            for first in range(0, size, _CHUNK_BYTES):
                chunk = buffer[: min(_CHUNK_BYTES, size - first)]
                self._file.read_into(chunk, begin + first)
                crc = zlib.crc32(chunk, crc)
            if crc != self._crc:
                raise CheckpointError(
                    f"[checkpoint.read] a tensor's bytes must have the CRC-32 that its file lists; got {crc:#x} "
                    f"instead of {self._crc:#x} for {shown(name)} in {str(self._file.path)!r}; it is damaged: download "
                    "or save it again"
                )
            self._is_verified = True


@dataclass(frozen=True)
class FileTensor(RowsOfFile):
    """A tensor of a file, some of its rows, or its transpose. It is read when it is indexed or
    converted to an array.

    Attributes:
        file: the file that contains it.
        name: name of the tensor in the file.
        dtype: dtype of the elements in the file.
        shape: shape of this tensor, after selecting rows or transposing.
        begin: position of its first element, in bytes from the file's start.
        row_bytes: bytes from one row of the file to the next. (Rows of the file are columns of this
            tensor if it is transposed.)
        is_transposed: whether the file has the transpose of this tensor.
        checksum: checksum of a range of bytes that contains the tensor; None if the file has none.
            It is verified before the first use.
    """

    file: OpenFile
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    row_bytes: int
    is_transposed: bool = False
    checksum: Checksum | None = None

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements in the file."""
        return self.size * self.dtype.itemsize

    @property
    def extent_bytes(self) -> int:
        """Bytes of the file from the tensor's first element to its last."""
        shape = self.shape[::-1] if self.is_transposed else self.shape
        if self.ndim < 2 or not self.size:
            return self.nbytes
        return (shape[0] - 1) * self.row_bytes + prod(shape[1:]) * self.dtype.itemsize

    def transpose(self) -> FileTensor:
        """The transpose of a matrix."""
        assert self.ndim == 2
        return replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed)

    def rows(self, first: int, count: int) -> FileTensor:
        """A range of rows. (The rows of a vector are its elements.)"""
        assert 0 <= first <= first + count <= self.shape[0]
        step = self.dtype.itemsize if self.is_transposed else self.row_bytes
        return replace(self, shape=(count, *self.shape[1:]), begin=self.begin + first * step)

    def columns(self, first: int, count: int) -> FileTensor:
        """A range of columns of a matrix."""
        return self.transpose().rows(first, count).transpose()

    def verify(self) -> None:
        """Verify the checksum of the bytes that contain the tensor, if the file has one.

        Raises:
            CheckpointError: the checksum differs.
        """
        if self.checksum is not None:
            self.checksum.verify(self.name)

    def read(self) -> NDArray[Any]:
        """The whole tensor, as a new array.

        Raises:
            CheckpointError: the file has changed since it was opened, or is damaged.
        """
        self.verify()
        shape = self.shape[::-1] if self.is_transposed else self.shape
        array = np.empty(shape, self.dtype)
        if array.size:
            matrix = array.reshape(shape[0] if shape else 1, -1).view(np.uint8)
            if matrix.shape[1] == self.row_bytes:
                self.file.read_into(matrix.reshape(-1).data, self.begin)
            else:
                for i, row in enumerate(matrix):
                    self.file.read_into(row.data, self.begin + i * self.row_bytes)
        return array.T if self.is_transposed else array


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor: in memory, in a file, or fetched when it is read.

    Attributes:
        box: the part's place in the whole tensor.
        values: the part's elements.
        device: number of the device that has the part.
    """

    box: Box
    values: NDArray[Any] | FileTensor | LazyTensor
    device: int = 0

    def read(self, box: Box) -> NDArray[Any]:
        """Some elements of the part. If the part is in a file and has more than two dims, elements
        in between are read too.

        Args:
            box: a box of the whole tensor, which must lie in this part.
        """
        inside, values = box.inside(self.box), self.values
        if isinstance(values, FileTensor) and values.ndim:
            values = values.rows(inside.begin[0], inside.sizes[0])
            inside = Box((0, *inside.begin[1:]), inside.sizes)
            if values.ndim == 2:
                values = values.columns(inside.begin[1], inside.sizes[1])
                inside = Box((0, 0), inside.sizes)
        return np.asarray(np.asarray(values)[inside.slices])


@dataclass(frozen=True)
class PartedTensor:
    """A tensor in parts that contain each element once. Parts are read when the tensor is converted
    to an array.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of the elements.
        parts: the parts, in any order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[TensorPart, ...]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def files(self) -> list[FileTensor]:
        """The parts in files."""
        return [part.values for part in self.parts if isinstance(part.values, FileTensor)]

    def verify(self) -> None:
        """Verify the checksums of the parts, if files have checksums.

        Raises:
            CheckpointError: a checksum differs.
        """
        for tensor in self.files:
            tensor.verify()

    def read_box(self, box: Box) -> NDArray[Any]:
        """Some elements of the tensor, from the parts that contain them. There is no copy if one
        part in memory contains all of them.

        Args:
            box: a box of the whole tensor.

        Raises:
            CheckpointError: a file has changed since it was opened, or is damaged.
        """
        intersections = [(part, part.box.meet(box)) for part in self.parts]
        overlapping = [(part, common) for part, common in intersections if common is not None]
        if len(overlapping) == 1 and overlapping[0][1] == box:
            return overlapping[0][0].read(box)
        values = np.empty(box.sizes, self.dtype)
        for part, common in overlapping:
            values[common.inside(box).slices] = part.read(common)
        return values

    def read(self) -> NDArray[Any]:
        """The whole tensor. Raises the errors of `read_box`."""
        return self.read_box(Box.whole(self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a tensor in parts cannot be an array without being copied")
        return self.read().astype(self.dtype if dtype is None else dtype, copy=False)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of known shape that is fetched when it is converted to an array.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the elements.
        fetch: returns the array. It is called for every use, so that the array stays in memory no
            longer than needed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fetch: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return read_array(self).astype(self.dtype if dtype is None else dtype, copy=False)


Tensor = NDArray[Any] | FileTensor | PartedTensor | LazyTensor | QuantisedTensor


def read_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor's elements in memory; of a quantised tensor, in bf16.

    Raises:
        CheckpointError: the array's shape or dtype differs from the tensor's description, or the
            array has masked elements.
    """
    if isinstance(tensor, (FileTensor, PartedTensor)):
        return tensor.read()
    if isinstance(tensor, QuantisedTensor):
        return tensor.read().astype(tensor.dtype)  # the numbers that it has in a model
    array = tensor.fetch() if isinstance(tensor, LazyTensor) else tensor
    if array.shape != tensor.shape or array.dtype != tensor.dtype:
        raise CheckpointError(
            f"[checkpoint.read] a tensor must match its description, {tensor.dtype} {list(tensor.shape)}; got "
            f"{array.dtype} {list(array.shape)}; fetch the same tensor"
        )
    _validate.without_mask("read", "a tensor", array)
    return array


def cast_tensors(tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors in other dtypes. Values are rounded to nearest, ties to even, when a tensor is
    fetched.

    Args:
        tensors: the tensors by name.
        dtypes: new dtypes by the tensors' names, as named in safetensors. Tensors that are not
            listed keep their dtypes.

    Returns:
        The tensors. Converting a tensor to an array raises CheckpointError if a finite value does
        not fit in its new dtype.
    """
    cast = dict(tensors)
    for name, tensor in tensors.items():
        dtype = dtype_of_name(dtypes.get(name, ""))
        if dtype is not None and dtype != tensor.dtype:
            cast[name] = LazyTensor(tuple(tensor.shape), dtype, partial(_cast, name, tensor, dtype))
    return cast


def _cast(name: str, tensor: Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
    array = read_array(tensor)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    beyond = np.isfinite(array) & ~np.isfinite(cast)
    if beyond.any():
        raise CheckpointError(
            f"[checkpoint.cast] a weight must be finite in the dtype that it is written in, {dtype}; got "
            f"{array[beyond][0]} in {shown(name)}; choose another dtype: output.dtype = 'bf16' or 'fp32'"
        )
    return cast


class WeightsFile(Mapping[str, FileTensor]):
    """A safetensors file. It is open while one of its tensors is in use.

    Attributes:
        entries: entries of the header, by the tensors' names.

    Raises:
        CheckpointError: the file is not a complete safetensors file. The message names the rule
            that it breaks.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = OpenFile(path, open_regular(path))
            self.entries: Mapping[str, TensorEntry] = _read_header(self._file.stream)
        except Unreadable as error:
            raise CheckpointError(
                f"[checkpoint.open_weights] weights must be a complete safetensors file; got {str(path)!r}: {error}; "
                "check the path, download or write it again"
            ) from error

    def __getitem__(self, name: str) -> FileTensor:
        entry = self.entries[name]
        rows = entry.shape[0] if entry.shape else 1
        row_bytes = (entry.end - entry.begin) // max(rows, 1)
        return FileTensor(self._file, name, entry.dtype, entry.shape, entry.begin, row_bytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _read_header(stream: BinaryIO) -> dict[str, TensorEntry]:
    """All tensors that a file's header lists.

    Raises:
        Unreadable: the file does not begin with a valid header, or the system cannot read it.
    """
    content = b""
    try:
        size = os.fstat(stream.fileno()).st_size
        content = os.pread(stream.fileno(), 8, 0)
        end = header_end(content, size)
        while len(content) < end:
            more = os.pread(stream.fileno(), end - len(content), len(content))
            if not more:
                raise Unreadable("it has become shorter")
            content += more
        return parse_header(content, size)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    except Unreadable:
        for start, what in _FOREIGN.items():
            if content.startswith(start):
                raise Unreadable(
                    f"it is {what}; neither safetensors nor a state dict of PyTorch 1.6 or later; convert it"
                ) from None
        raise
