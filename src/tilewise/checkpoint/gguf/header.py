"""The header of a GGUF file: its key-values, and the place and type of every tensor.

A file consists of the magic number, a version, the number of tensors and of key-values, the
key-values, the descriptions of tensors, and the tensors, each at a multiple of the file's alignment.
Versions 2 and 3 in little endian are read. Everything else is rejected, and the error names the key
or the tensor and the rule. Counts and lengths are compared with the bytes that are left before
anything is allocated. `checkpoint.gguf.files` opens files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable
from tilewise.formats import WeightFormat, weight_format

__all__ = ["MAGIC", "Header", "Scalar", "TensorInfo", "Value", "parse_header"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_SIZE = 1 << 62
_MAX_TENSORS = 1 << 16
_MAX_VALUES = 1 << 16
_MAX_KEY_BYTES = 1 << 16  # the format's own limit
_MAX_HEADER_BYTES = 256 << 20
_MAX_STRINGS = 1 << 22  # of all arrays together; each takes many times its bytes in memory
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32
_CHUNK_BYTES = 4 << 20

# Value types of the format; 8 is a string and 9 an array.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Mapping[int, np.dtype[Any]] = {
    number: np.dtype(kind)
    for number, kind in {
        0: "u1",
        1: "i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        _BOOL: "u1",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}

# Tensor types that are read: a dtype, or a format of blocks.
_TYPES: Mapping[int, np.dtype[Any] | WeightFormat] = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    2: weight_format("q4_0"),
    3: weight_format("q4_1"),
    6: weight_format("q5_0"),
    7: weight_format("q5_1"),
    8: weight_format("q8_0"),
    10: weight_format("q2_k"),
    11: weight_format("q3_k"),
    12: weight_format("q4_k"),
    13: weight_format("q5_k"),
    14: weight_format("q6_k"),
    20: weight_format("iq4_nl"),
    23: weight_format("iq4_xs"),
    30: np.dtype(ml_dtypes.bfloat16),
    39: weight_format("mxfp4"),
}
_OTHERS = {
    9: "q8_1",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    28: "f64",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    40: "nvfp4",
}
_READ = "f32, f16, bf16, " + ", ".join(
    str(kind) for kind in _TYPES.values() if isinstance(kind, WeightFormat)
)

Scalar = bool | int | float | str
Value = Scalar | list[str] | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file.

    Attributes:
        kind: its dtype, or the format of its blocks.
        shape: its shape, rows first. (Files list the dims in the reverse order.)
        begin, end: the range of its bytes, counted from the file's start.
    """

    kind: np.dtype[Any] | WeightFormat
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors.

    Attributes:
        values: the key-values: numbers, texts, and arrays (of texts as lists, of numbers as NumPy
            arrays).
        tensors: the tensors by name.
    """

    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def parse_header(read: Callable[[int, int], bytes], size: int) -> Header:
    """The header of a file.

    Args:
        read: returns the bytes `[begin, end)` of the file; fewer if the file has become shorter.
        size: size of the file in bytes.

    Raises:
        Unreadable: the header breaks a rule of the format, does not fit the file, or has a tensor of a
            type that is not supported.
    """
    cursor = _Cursor(read, min(size, _MAX_HEADER_BYTES))
    magic = cursor.take(4)
    if magic != MAGIC:
        raise Unreadable(f"it must begin with {MAGIC!r} and begins with {magic!r}")
    version = cursor.integer("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in _VERSIONS:
            raise Unreadable(
                "it is big-endian, and only little-endian files are read; convert its byte order"
            )
        raise Unreadable(f"it has version {version} of the format, and versions 2 and 3 are read")
    num_tensors, num_values = cursor.integer("<Q"), cursor.integer("<Q")
    for count, limit, what in (
        (num_tensors, _MAX_TENSORS, "tensors"),
        (num_values, _MAX_VALUES, "key-values"),
    ):
        if count > limit:
            raise Unreadable(f"it lists {count} {what}, more than {limit}")
    values: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.text("a key", _MAX_KEY_BYTES)
        if key in values:
            raise Unreadable(f"key {shown(key)} appears twice")
        values[key] = _value(cursor, key)
    alignment = _alignment(values)
    stored = [_stored_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in stored:
        if name in tensors:
            raise Unreadable(f"tensor {shown(name)} appears twice")
        if offset % alignment:
            raise Unreadable(f"tensor {shown(name)} is not at a multiple of the alignment {alignment}")
        begin, num_bytes = start + offset, _num_bytes(kind, shape)
        if begin + num_bytes > size:
            raise Unreadable(
                f"tensor {shown(name)} ends at byte {begin + num_bytes}, but the file has {size}; the download is "
                "incomplete"
            )
        tensors[name] = TensorInfo(kind, shape, begin, begin + num_bytes)
    _check_overlaps(tensors)
    return Header(values, tensors)


def _alignment(values: Mapping[str, Value]) -> int:
    """What positions of tensors are multiples of."""
    value = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_power = isinstance(value, int) and 1 <= value <= _MAX_ALIGNMENT and not value & (value - 1)
    if not isinstance(value, int) or isinstance(value, bool) or not is_power:
        raise Unreadable(
            f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}; got {shown(value)}"
        )
    return value


class _Cursor:
    """Reads the header from front to back, in chunks.

    Args:
        read: as for `parse_header`.
        size: the largest number of bytes that the header may have.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size = read, size
        self._bytes = bytearray()
        self.position = 0
        self.num_strings = 0

    def need(self, count: int) -> None:
        """Have `count` more bytes in memory.

        Raises:
            Unreadable: the file does not have them.
        """
        end = self.position + count
        if end <= len(self._bytes):
            return
        if end > self._size:
            limit = " or its header is too long" if self._size == _MAX_HEADER_BYTES else ""
            raise Unreadable(
                f"it ends within its header{limit}; the download is incomplete, or it is damaged"
            )
        while len(self._bytes) < end:
            more = self._read(len(self._bytes), min(self._size, max(end, len(self._bytes) + _CHUNK_BYTES)))
            if not more:
                raise Unreadable("it has become shorter")
            self._bytes += more

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.need(count)
        begin = self.position
        self.position += count
        return bytes(self._bytes[begin : self.position])

    def integer(self, kind: str) -> int:
        """The next integer, of a format of `struct`."""
        (number,) = struct.unpack(kind, self.take(struct.calcsize(kind)))
        return int(number)

    def text(self, what: str, limit: int = _MAX_HEADER_BYTES) -> str:
        """The next text.

        Args:
            what: whose text, for the message.
            limit: the largest number of bytes.
        """
        length = self.integer("<Q")
        if length > limit:
            raise Unreadable(f"{what} has {length} bytes, more than {limit}")
        content = self.take(length)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise Unreadable(f"{what} is not UTF-8: {shown(content)}") from None


def _value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.integer("<I")
    what = f"the value of {shown(key)}"
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _array(cursor, what)
    if kind not in _NUMBERS:
        raise Unreadable(f"{what} has the unknown type {kind}")
    number = np.frombuffer(cursor.take(_NUMBERS[kind].itemsize), _NUMBERS[kind])[0]
    if kind == _BOOL:
        return bool(_truth(number, what))
    return number.item()  # type: ignore[no-any-return]


def _array(cursor: _Cursor, what: str) -> Value:
    kind, count = cursor.integer("<I"), cursor.integer("<Q")
    if kind == _STRING:
        cursor.num_strings += count
        if cursor.num_strings > _MAX_STRINGS:
            raise Unreadable(f"its arrays have more than {_MAX_STRINGS} texts")
        entry = partial(cursor.text, what)
        return [entry() for _ in range(count)]
    if kind == _ARRAY:
        raise Unreadable(f"{what} is an array of arrays, which no model has")
    if kind not in _NUMBERS:
        raise Unreadable(f"{what} is an array of the unknown type {kind}")
    dtype = _NUMBERS[kind]
    if count > _MAX_HEADER_BYTES:
        raise Unreadable(f"{what} has {count} entries, more than {_MAX_HEADER_BYTES}")
    numbers = np.frombuffer(cursor.take(count * dtype.itemsize), dtype)
    return _truth(numbers, what) if kind == _BOOL else numbers


def _truth(numbers: Any, what: str) -> Any:
    """Bytes as truth values."""
    if np.any(numbers > 1):
        raise Unreadable(f"{what} must be true or false; got another byte")
    return np.asarray(numbers == 1)


def _stored_tensor(
    cursor: _Cursor,
) -> tuple[str, np.dtype[Any] | WeightFormat, tuple[int, ...], int]:
    """Name, type, shape and offset of the next tensor."""
    name = cursor.text("the name of a tensor", _MAX_KEY_BYTES)
    num_dims = cursor.integer("<I")
    if num_dims > _MAX_DIMS:
        raise Unreadable(f"tensor {shown(name)} has {num_dims} dims, more than {_MAX_DIMS}")
    shape = tuple(cursor.integer("<Q") for _ in range(num_dims))[::-1]
    number, offset = cursor.integer("<I"), cursor.integer("<Q")
    if number not in _TYPES:
        called = _OTHERS.get(number, f"number {number}")
        raise Unreadable(f"tensor {shown(name)} has type {called}, which is not supported ({_READ} are)")
    kind = _TYPES[number]
    # Python's integers do not overflow: the product is exact
    if 0 in shape or math.prod(shape) * 8 >= _MAX_SIZE or offset >= _MAX_SIZE:
        raise Unreadable(f"tensor {shown(name)} has an invalid shape {list(shape)} or offset {offset}")
    if isinstance(kind, WeightFormat) and (not shape or shape[-1] % kind.block):
        raise Unreadable(
            f"tensor {shown(name)} of type {kind} has rows of {shape[-1] if shape else 1} elements, which are not "
            f"whole blocks of {kind.block}"
        )
    return name, kind, shape, offset


def _num_bytes(kind: np.dtype[Any] | WeightFormat, shape: tuple[int, ...]) -> int:
    if isinstance(kind, WeightFormat):
        return math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
    return math.prod(shape) * kind.itemsize


def _check_overlaps(tensors: Mapping[str, TensorInfo]) -> None:
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin < end:
            raise Unreadable(f"tensor {shown(name)} overlaps the previous one")
        end = info.end
