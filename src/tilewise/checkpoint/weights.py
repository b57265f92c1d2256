"""Weights in safetensors files: opened lazily, written atomically.

`open_weights` maps the files into memory; a tensor costs nothing until its elements are read, and
`weights[name][a:b]` reads those rows only. bf16 comes and goes as `ml_dtypes.bfloat16`. Refuses files whose
header does not fit their size. Data comes from a Hugging Face directory or a single file and goes to
`GraphInstance.load_parameters`.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.files import replace_file, replace_text
from tilewise.core import CheckpointError

__all__ = ["open_weights", "write_weights"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
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


def open_weights(path: str | Path) -> Mapping[str, NDArray[Any]]:
    """The tensors of a safetensors file, or of a Hugging Face directory with one or several of them.

    Returns:
        A mapping from name to a read-only array that lies in the file; nothing is read until it is used.

    Raises:
        CheckpointError: no such file, a broken header, an index that names absent tensors.
    """
    path = Path(path)
    if path.is_file():
        return _MappedFile(path)
    if (path / INDEX).is_file():
        return _open_indexed(path)
    if (path / SINGLE).is_file():
        return _MappedFile(path / SINGLE)
    raise CheckpointError(
        f"[checkpoint.open_weights] the path must be a safetensors file or a directory that holds {SINGLE}; "
        f"got {str(path)!r}; check the path"
    )


def write_weights(
    directory: str | Path, tensors: Iterable[tuple[str, NDArray[Any]]], max_shard_bytes: int = 4 << 30
) -> None:
    """Write tensors as `model.safetensors`, or as numbered files with an index when they exceed one shard.

    At most one shard is held in memory. Each file is replaced atomically; the index comes last.
    """
    directory = Path(directory)
    shards: list[list[str]] = []
    total_bytes = 0
    part: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors:
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > max_shard_bytes:
            shards.append(_write_part(directory, len(shards), part))
            part = {}
        part[name] = np.ascontiguousarray(tensor)
        total_bytes += tensor.nbytes
    if not shards:
        _write_file(directory / SINGLE, part)
        return
    shards.append(_write_part(directory, len(shards), part))
    _number_parts(directory, shards, total_bytes)


class _MappedFile(Mapping[str, NDArray[Any]]):
    """One safetensors file in memory; the map lives as long as an array that points into it."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._start, self._entries = _parse_header(self._map)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"[checkpoint.open_weights] a weights file must be whole safetensors; got {path}: {error}; "
                "download or write it again"
            ) from None

    def __getitem__(self, name: str) -> NDArray[Any]:
        dtype, shape, begin, _ = self._entries[name]
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._map, dtype, count, self._start + begin).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _IndexedFiles(Mapping[str, NDArray[Any]]):
    """Several files behind one index."""

    def __init__(self, files: Mapping[str, _MappedFile]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._files[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


_Entry = tuple[Any, tuple[int, ...], int, int]


def _parse_header(data: mmap.mmap) -> tuple[int, dict[str, _Entry]]:
    """Start of the data and every tensor's dtype, shape, first and last byte; ValueError when they do not
    fit."""
    length = int.from_bytes(data[:8], "little")
    start = 8 + length
    if len(data) < 8 or start > len(data):
        raise ValueError(f"its header should take {length} bytes, the file has {len(data)}")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    entries: dict[str, _Entry] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {entry['dtype']}, which is not supported")
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != dtype.itemsize * int(np.prod(shape, dtype=np.int64)) or not 0 <= begin <= end:
            raise ValueError(f"tensor {name!r} of shape {list(shape)} does not fit its {end - begin} bytes")
        if start + end > len(data):
            raise ValueError(f"tensor {name!r} ends after the end of the file")
        entries[name] = (dtype, shape, begin, end)
    return start, entries


def _open_indexed(directory: Path) -> Mapping[str, NDArray[Any]]:
    try:
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        opened = {name: _MappedFile(directory / name) for name in sorted(set(weight_map.values()))}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"[checkpoint.open_weights] {INDEX} must map tensors to files; got {directory}: "
            f"{error}; download it again"
        ) from None
    for tensor, name in weight_map.items():
        if tensor not in opened[name]:
            raise CheckpointError(
                f"[checkpoint.open_weights] {name} must hold what the index says; got no "
                f"{tensor!r}; download it again"
            )
    return _IndexedFiles({tensor: opened[name] for tensor, name in weight_map.items()})


def _write_file(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    from safetensors.numpy import save_file

    replace_file(path, lambda temporary: save_file(tensors, str(temporary), metadata={"format": "pt"}))


def _part_name(index: int) -> str:
    return f".part-{index + 1:05d}.safetensors"


def _write_part(directory: Path, index: int, tensors: dict[str, NDArray[Any]]) -> list[str]:
    _write_file(directory / _part_name(index), tensors)
    return list(tensors)


def _number_parts(directory: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the parts their final names, known only now that their number is, and write the index."""
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / _part_name(i)).replace(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True)
    replace_text(directory / INDEX, text)
