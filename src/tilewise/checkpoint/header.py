"""The header of a safetensors file: the place of every tensor.

A file consists of eight bytes with the length of the header, the header (a JSON object that
describes the tensors), and the bytes of the tensors, which cover the rest of the file without gaps
or overlaps. Everything else is rejected, and the error names the tensor and the rule. Parsing is a
pure function of the file's bytes. `checkpoint.tensors` opens files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, parse_json

__all__ = [
    "MAX_DIMS",
    "MAX_HEADER_BYTES",
    "MAX_SIZE",
    "TensorEntry",
    "dtype_name",
    "dtype_of_name",
    "header_end",
    "is_storable",
    "parse_header",
]

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "BOOL": np.bool_,
}
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 32  # what every NumPy can hold
MAX_SIZE = 1 << 62  # sizes and bytes lie below

_Count = Annotated[int, Field(ge=0, lt=MAX_SIZE)]


class _StoredTensor(BaseModel):
    """A tensor in the header's notation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: Annotated[list[_Count], Field(max_length=MAX_DIMS)]
    data_offsets: tuple[_Count, _Count]


class _Header(BaseModel):
    """The header. Every key except `__metadata__` is the name of a tensor."""

    model_config = ConfigDict(strict=True, extra="allow")

    metadata: dict[str, str] = Field(default_factory=dict, alias="__metadata__")
    __pydantic_extra__: dict[str, _StoredTensor]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file.

    Attributes:
        begin, end: the range of its bytes, counted from the file's start.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Whether the format has a name for a dtype."""
    return any(np.dtype(kind) == dtype for kind in _DTYPES.values())


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The format's name of a dtype."""
    return next(name for name, kind in _DTYPES.items() if np.dtype(kind) == dtype)


def dtype_of_name(name: str) -> np.dtype[Any] | None:
    """The dtype with this name in the format; None if there is no such dtype."""
    return np.dtype(_DTYPES[name]) if name in _DTYPES else None


def header_end(data: bytes, size: int) -> int:
    """The byte at which a header ends and tensors begin.

    Args:
        data: the file's first bytes: at least eight, if the file has as many.
        size: size of the whole file in bytes.

    Raises:
        Unreadable: the file is shorter than its header.
    """
    if size < _LENGTH_BYTES or len(data) < _LENGTH_BYTES:
        raise Unreadable(f"it has {size} bytes, too few for the length of a header")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or _LENGTH_BYTES + length > size:
        raise Unreadable(f"its header should have {length} bytes, but the file has {size}")
    return _LENGTH_BYTES + length


def parse_header(data: bytes, size: int | None = None) -> dict[str, TensorEntry]:
    """All tensors of a safetensors file, by name.

    Args:
        data: the file's first bytes, at least its header.
        size: size of the whole file in bytes; None if `data` is the whole file.

    Raises:
        Unreadable: the header breaks a rule of the format, or does not fit the file.
    """
    size = len(data) if size is None else size
    start = header_end(data, size)
    content = data[_LENGTH_BYTES:start]
    if not content.startswith(b"{"):
        raise Unreadable("its header does not begin with '{'")
    stored = parse_json(content, _Header).__pydantic_extra__
    entries = {name: _entry(name, tensor, start) for name, tensor in stored.items()}
    _check_covering(entries, start, size)
    return entries


def _entry(name: str, stored: _StoredTensor, start: int) -> TensorEntry:
    """One tensor, after checking that its dtype, shape and range of bytes agree."""
    if stored.dtype not in _DTYPES:
        raise Unreadable(f"tensor {shown(name)} has dtype {shown(stored.dtype)}, which is not supported")
    dtype = np.dtype(_DTYPES[stored.dtype])
    begin, end = stored.data_offsets
    if math.prod(max(1, size) for size in stored.shape) * dtype.itemsize >= MAX_SIZE:
        raise Unreadable(f"tensor {shown(name)} has an invalid shape {shown(stored.shape)}")
    if end - begin != math.prod(stored.shape) * dtype.itemsize:
        raise Unreadable(
            f"tensor {shown(name)} of shape {shown(stored.shape)} does not fit its {end - begin} bytes"
        )
    return TensorEntry(dtype, tuple(stored.shape), start + begin, start + end)


def _check_covering(entries: dict[str, TensorEntry], start: int, file_bytes: int) -> None:
    """Check that the tensors' bytes cover the file from the header to its end, without gaps or
    overlaps.
    """
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < position:
            raise Unreadable(f"tensor {shown(name)} overlaps the previous one")
        if entry.begin > position:
            raise Unreadable(f"{entry.begin - position} bytes before {shown(name)} belong to no tensor")
        position = entry.end
    if position != file_bytes:
        raise Unreadable(f"its tensors end at byte {position}, but the file has {file_bytes}")
