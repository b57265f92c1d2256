"""Files of `torch.save`: state dicts as lazy tensors, without executing anything in the file.

A storage is a block of bytes that tensors share. A file is an uncompressed archive (`archive`): it
has a pickle (`pickles`) that lists the tensors, and for each storage a part with its bytes.
`open_state_dict` returns the tensors by name. A tensor is read on request, after the checksum of
its whole storage was verified. Rejected are files that name anything but tensors, tensors that
reach beyond their storage or have unusual strides, and files that are not state dicts. PyTorch is
not needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tilewise.checkpoint.archive import Part, read_archive, read_part
from tilewise.checkpoint.open_file import OpenFile
from tilewise.checkpoint.pickles import MAX_PICKLE_BYTES, Name, Record, parse_pickle, worded
from tilewise.checkpoint.tensors import Checksum, FileTensor
from tilewise.core import CheckpointError
from tilewise.core.validation import Validator, bare, shown
from tilewise.files.reading import Unreadable, open_regular

__all__ = [
    "Storages",
    "choose_part",
    "dtype_of",
    "has_torch_weights",
    "is_torch_file",
    "open_state_dict",
    "open_torch_directory",
    "sizes_of",
]

_validate = Validator("checkpoint", CheckpointError)
_ARCHIVE = b"PK\x03\x04"
_WHOLE = "pytorch_model.bin"
_SHARD = re.compile(r"pytorch_model(-[0-9]{5}-of-[0-9]{5})?\.bin")
_MAX_DIMS = 32
_MAX_SIZE = 1 << 62
_MAX_ELEMENTS = 1 << 56
_DTYPES: Mapping[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}
_STORED = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_TENSOR = Name("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = Name("torch._utils", "_rebuild_parameter")


def is_torch_file(path: Path) -> bool:
    """Whether a file begins like a file of `torch.save`. A safetensors file may begin with the same
    bytes, which are the length of its header, but the length's last bytes are zeros.
    """
    try:
        with open_regular(path) as stream:
            start = stream.read(8)
            return start.startswith(_ARCHIVE) and start[4:] != bytes(4)
    except (Unreadable, OSError):
        return False


def open_state_dict(path: str | Path, part: str | None = None) -> Mapping[str, FileTensor]:
    """The tensors of a state dict that `torch.save` wrote. They are read on use, and nothing in the
    file is executed.

    Args:
        path: path of the file.
        part: key of the state dict, such as `model`, if the file contains more than a state dict.

    Raises:
        CheckpointError: the file is not a file of `torch.save`, is damaged, or names anything but
            tensors.
    """
    path = _validate.path("open_state_dict", "a file", path)
    if part is not None:
        _validate.text("open_state_dict", "part", part)
    try:
        file = OpenFile(path, open_regular(path))
        storages = Storages(file, 0, _size(file))
        content = choose_part(storages.content, part)
        return {name: storages.tensor(name, value) for name, value in content.items()}
    except Unreadable as error:
        raise CheckpointError(
            f"[checkpoint.open_state_dict] weights must be a state dict written by torch.save; got "
            f"{str(path)!r}: {error}; save the state dict alone, or as safetensors"
        ) from None


def open_torch_directory(directory: str | Path) -> Mapping[str, FileTensor]:
    """The tensors of a Hugging Face directory from before safetensors: pytorch_model.bin, or
    several numbered files.

    Args:
        directory: directory of the model.

    Raises:
        CheckpointError: there are no such files, one of the numbered files is missing, or a tensor
            is in two files. Also the errors of `open_state_dict`.
    """
    root = _validate.path("open_torch_directory", "a directory", directory)
    names = sorted(name for name in os.listdir(root) if _SHARD.fullmatch(name)) if root.is_dir() else []
    count = int(names[0][-9:-4]) if names and names[0] != _WHOLE else 1
    wanted = [_WHOLE] if count == 1 and _WHOLE in names else [_shard(i + 1, count) for i in range(count)]
    if names != wanted:
        raise CheckpointError(
            f"[checkpoint.open_torch_directory] a directory must hold {_WHOLE} or all of its parts; got "
            f"{shown(names)} in {str(root)!r}; download it again"
        )
    tensors: dict[str, FileTensor] = {}
    for name in names:
        for tensor, value in open_state_dict(root / name).items():
            if tensor in tensors:
                raise CheckpointError(
                    f"[checkpoint.open_torch_directory] a tensor must be in one file only; got {shown(tensor)} in "
                    f"{name!r} and in an earlier file in {str(root)!r}; download it again"
                )
            tensors[tensor] = value
    return tensors


def _shard(number: int, count: int) -> str:
    return f"pytorch_model-{number:05d}-of-{count:05d}.bin"


def has_torch_weights(directory: Path) -> bool:
    """Whether a directory has weights for `open_torch_directory`."""
    return any(_SHARD.fullmatch(name) for name in os.listdir(directory))


def _size(file: OpenFile) -> int:
    return file.stream.seek(0, 2)


def choose_part(content: Any, part: str | None) -> Mapping[str, Any]:
    """The dictionary of tensors in a file's content.

    Raises:
        Unreadable: the content has no such dictionary, or it is unclear which one is meant.
    """
    if part is not None and isinstance(content, dict):
        if part not in content:
            parts = ", ".join(worded(key) for key in list(content)[:8])
            raise Unreadable(f"it has no part {shown(part)}, only {parts or 'nothing'}")
        content = content[part]
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise Unreadable("it is not a dictionary of tensors by name")
    odd = next((name for name, value in content.items() if not _is_tensor(value)), None)
    if odd is not None:
        dicts = [key for key, value in content.items() if _is_state_dict(value)]
        part = bare(dicts[0]) if dicts else "KEY"
        advice = (
            f"name the part that is the state dict: --part {part} of `tilewise convert`, or save it alone"
        )
        raise Unreadable(f"it holds {shown(odd)}, which is not a tensor; {advice}")
    return content


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_tensor, value.values()))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Record) and value.name in (_TENSOR, _PARAMETER)


class Storages:
    """One archive of `torch.save`: the content of its pickle, and its tensors.

    Args:
        file: the open file.
        begin: first byte of the archive in the file.
        size: size of the archive in bytes.
        max_bytes: maximum size of the archive's directory, and of its pickle.

    Attributes:
        content: content of the pickle.

    Raises:
        Unreadable: the range is not an archive of `torch.save`.
    """

    def __init__(self, file: OpenFile, begin: int, size: int, max_bytes: int = MAX_PICKLE_BYTES) -> None:
        self._file = file
        self._checksums: dict[Part, Checksum] = {}
        self._parts = read_archive(file, begin, size, max_bytes)
        pickles = [name for name in self._parts if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Unreadable("it is not a torch.save archive: it must have one data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        order = self._parts.get(f"{self._root}byteorder")
        if order is not None and read_part(file, order, 16) != b"little":
            raise Unreadable("its numbers are not little-endian")
        self.content = parse_pickle(read_part(file, self._parts[pickles[0]], max_bytes))

    def tensor(self, name: str, value: Any) -> FileTensor:
        """The tensor in the file that a record of the pickle describes.

        Args:
            name: name of the result, also for messages.
            value: the pickle's record of the tensor.

        Raises:
            Unreadable: the record is invalid, or the tensor reaches beyond its storage.
        """
        if isinstance(value, Record) and value.name == _PARAMETER and len(value.arguments) == 3:
            value = value.arguments[0]
        if not isinstance(value, Record) or value.name != _TENSOR or len(value.arguments) not in (6, 7):
            raise Unreadable(f"{shown(name)} is not a plain tensor")
        storage, offset, shape, strides = value.arguments[:4]
        shape, strides = sizes_of(shape), sizes_of(strides)
        if len(shape) != len(strides) or not _is_count(offset):
            raise Unreadable(f"{shown(name)} is not a plain tensor")
        dtype, part = self._storage(name, storage)
        is_transposed = _is_transposed(shape, strides)
        rows, steps = (shape[::-1], strides[::-1]) if is_transposed else (shape, strides)
        row = prod(rows[1:])
        if not _are_plain(rows, steps):
            raise Unreadable(f"{shown(name)} is a view of a larger tensor; save a contiguous copy of it")
        step = steps[0] if len(rows) > 1 and rows[0] > 1 else max(row, 1)
        extent = 0 if 0 in shape else (rows[0] - 1) * step + row if rows else 1
        if (offset + extent) * dtype.itemsize > part.size:
            raise Unreadable(f"{shown(name)} reaches beyond its storage")
        begin = part.begin + offset * dtype.itemsize
        checksum = self._checksum(part)
        return FileTensor(
            self._file, name, dtype, shape, begin, step * dtype.itemsize, is_transposed, checksum
        )

    def _checksum(self, part: Part) -> Checksum | None:
        """The checksum of a storage, which all tensors in it share."""
        if part.crc is None:
            return None
        new = Checksum(self._file, part.begin, part.size, part.crc)
        return self._checksums.setdefault(part, new)

    def _storage(self, name: str, record: Any) -> tuple[np.dtype[Any], Part]:
        """Dtype and place of a storage."""
        if not isinstance(record, Record) or record.name is not None or len(record.arguments) != 5:
            raise Unreadable(f"{shown(name)} has no storage")
        kind, stored, key, _, count = record.arguments
        is_known = isinstance(stored, Name) and stored.module == "torch" and stored.name in _STORED
        if kind != "storage" or not is_known or not isinstance(key, str) or not _is_count(count):
            raise Unreadable(f"{shown(name)} has a storage of an unknown kind")
        part = self._parts.get(f"{self._root}data/{key}")
        dtype = np.dtype(_DTYPES[_STORED[stored.name]])
        if part is None or part.size != count * dtype.itemsize:
            raise Unreadable(f"the storage of {shown(name)} is missing or has another size")
        return dtype, part


def dtype_of(name: Any) -> np.dtype[Any]:
    """The dtype that a pickle names, such as `torch float32`.

    Raises:
        Unreadable: the dtype is unknown.
    """
    if not isinstance(name, Name) or name.module != "torch" or name.name not in _DTYPES:
        raise Unreadable("a dtype in it is not supported")
    dtype: np.dtype[Any] = np.dtype(_DTYPES[name.name])
    return dtype


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE


def sizes_of(value: Any) -> tuple[int, ...]:
    """Sizes, offsets or strides, from a tuple or a `torch.Size`.

    Raises:
        Unreadable: an array cannot have such numbers.
    """
    if isinstance(value, Record) and value.name == Name("torch", "Size") and len(value.arguments) < 2:
        value = value.arguments[0] if value.arguments else ()
    is_plain = isinstance(value, tuple) and len(value) <= _MAX_DIMS and all(map(_is_count, value))
    if not is_plain or prod(max(n, 1) for n in value) > _MAX_ELEMENTS:
        raise Unreadable("the sizes of a tensor in it are invalid")
    return tuple(value)


def _are_plain(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements of a row are contiguous and rows do not overlap. With more than two
    dims, whether all elements are contiguous.
    """
    if 0 in shape:
        return True
    contiguous = 1
    for dim in range(len(shape) - 1, -1, -1):
        is_row = dim == 0 and len(shape) == 2
        fits = strides[dim] >= contiguous if is_row else strides[dim] == contiguous
        if shape[dim] > 1 and not fits:
            return False
        contiguous *= shape[dim]
    return True


def _is_transposed(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the file has the transpose of a matrix."""
    if len(shape) != 2 or 0 in shape or _are_plain(shape, strides):
        return False
    return _are_plain(shape[::-1], strides[::-1])
