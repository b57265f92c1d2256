"""Writes GGUF files of version 3: key-values, and tensors in Q8_0, Q4_0, BF16 and F32.

A file consists of the magic number, the version, the numbers of tensors and of key-values, the
key-values, the descriptions of tensors, and the tensors, each at a multiple of 32 bytes. Tensors are
fetched and converted one at a time, some rows at a time, and written to a hidden file that is renamed
at the end. `models.gguf` and `checkpoint.gguf_vocabulary` say what a model's file contains.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.tensors import Tensor, read_array
from tilewise.core.errors import CheckpointError
from tilewise.files.writing import replace_file
from tilewise.formats.quantise import quantise

__all__ = ["FILE_TYPES", "GGUF_TYPES", "GgufTensor", "Value", "write_gguf"]

Array = NDArray[Any]
Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]
GGUF_TYPES = ("bf16", "q8_0", "q4_0")
"""The types in which matrices are written."""
FILE_TYPES = {"bf16": 32, "q8_0": 7, "q4_0": 2}
"""`general.file_type` of a file whose matrices have a type."""
_VERSION = 3
_ALIGNMENT = 32
_KINDS = {"f32": 0, "q4_0": 2, "q8_0": 8, "bf16": 30}
_BITS = {"q8_0": 8, "q4_0": 4}
_BLOCK = 32
_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10
_CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to be written.

    Attributes:
        name: its name in the file.
        kind: `f32`, `bf16`, `q8_0` or `q4_0`.
        values: the tensor.
        heads: number of heads whose rows are reordered: element i of the first half of a head is
            followed by element i of its second half, as llama.cpp has Llama's queries and keys. 0: none.
        offset: is added to the elements.
    """

    name: str
    kind: str
    values: Tensor
    heads: int = 0
    offset: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        size = int(np.prod(self.values.shape))
        if self.kind in _BLOCK_BYTES:
            return size // _BLOCK * _BLOCK_BYTES[self.kind]
        return size * (4 if self.kind == "f32" else 2)

    def rows(self) -> Iterator[Array]:
        """The bytes of the file, some rows at a time.

        Raises:
            CheckpointError: an element is not finite, or too large for the type.
        """
        whole = read_array(self.values)
        matrix = whole.reshape(1, -1) if whole.ndim < 2 else whole
        if self.heads:
            half = whole.shape[0] // self.heads // 2
            order = np.arange(whole.shape[0]).reshape(self.heads, 2, half).swapaxes(1, 2).reshape(-1)
            matrix = whole.reshape(1, -1)[:, order] if whole.ndim < 2 else whole[order]
        step = max(1, _CHUNK_ELEMENTS // max(1, matrix.shape[1]))
        for first in range(0, len(matrix), step):
            with np.errstate(over="ignore"):
                values = matrix[first : first + step].astype(np.float32) + np.float32(self.offset)
            yield self._converted(values)

    def _converted(self, values: Array) -> Array:
        if self.kind in _BITS:
            blocks = quantise(np.ascontiguousarray(values), _BITS[self.kind], _BLOCK)
            scales = blocks.reshape(-1, _BLOCK_BYTES[self.kind])[:, :2]
            is_finite = np.isfinite(np.ascontiguousarray(scales).view(np.float16)).all()
            converted: Array = blocks
        else:
            with np.errstate(over="ignore"):
                converted = values.astype(np.float32 if self.kind == "f32" else ml_dtypes.bfloat16)
            is_finite = np.isfinite(converted.astype(np.float32)).all()
        if not is_finite:
            raise CheckpointError(
                f"[checkpoint.write_gguf] weights must be finite in {self.kind}; got others in {self.name!r}; write "
                "them as bf16, or repair the model"
            )
        return converted


def write_gguf(
    path: Path,
    values: Mapping[str, Value],
    tensors: Sequence[GgufTensor],
    show: Callable[[int, int], object] | None = None,
) -> None:
    """Write a file in one step.

    Args:
        path: the file; an existing one is replaced.
        values: the key-values. Integers are written as u32, or as i32 in sequences; numbers as f32.
        tensors: the tensors, in the order of the file.
        show: called with the bytes of tensors written so far, and in total.

    Raises:
        CheckpointError: a weight is not finite in its type.
        ResourceError: the file cannot be written. No part of it remains, and an existing file is kept.
    """
    total = sum(tensor.nbytes for tensor in tensors)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            stream.write(_header(values, tensors))
            _pad(stream)
            done = 0
            for tensor in tensors:
                for rows in tensor.rows():
                    done += stream.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
                    if show is not None:
                        show(done, total)
                _pad(stream)
            assert done == total

    replace_file(path, write)


def _pad(stream: BinaryIO) -> None:
    stream.write(bytes(-stream.tell() % _ALIGNMENT))


def _header(values: Mapping[str, Value], tensors: Sequence[GgufTensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(values))]
    for key, value in values.items():
        parts += [_text(key), _value(value)]
    begin = 0
    for tensor in tensors:
        shape = tuple(tensor.values.shape)[::-1]  # the format lists the fastest dim first
        parts += [_text(tensor.name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        parts.append(struct.pack("<IQ", _KINDS[tensor.kind], begin))
        begin += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    return b"".join(parts)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Value) -> bytes:
    """A value with its type."""
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value) if value < 1 << 32 else struct.pack("<IQ", _U64, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if value and isinstance(value[0], str):
        texts = b"".join(_text(str(one)) for one in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + texts
    is_integer = not value or isinstance(value[0], int)
    kind, dtype = (_I32, "<i4") if is_integer else (_F32, "<f4")
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + np.asarray(value, dtype).tobytes()
