"""Weights in safetensors files: opened lazily, written atomically.

`open_weights` maps the files into memory; a tensor costs nothing until its elements are read, and
`weights[name][a:b]` reads those rows only. bf16 comes and goes as `ml_dtypes.bfloat16`. Refuses files that break a rule
of the format (`checkpoint.header`) and indexes that name anything but the tensors of files beside them. Data comes
from a Hugging Face directory or a single file and goes to `GraphInstance.load_parameters`.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from tilewise.checkpoint.header import TensorEntry, is_storable, parse_header
from tilewise.core import CheckpointError
from tilewise.core.border import Border, shown
from tilewise.core.reading import Unreadable, open_regular, read_json
from tilewise.core.writing import replace_file, replace_text

__all__ = ["WeightsFile", "open_weights", "save_tensors", "write_weights"]

_border = Border("checkpoint", CheckpointError)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Index(BaseModel):
    """`model.safetensors.index.json`; what else it holds (a total size) is not used."""

    model_config = ConfigDict(strict=True, extra="ignore")

    weight_map: dict[str, str]


def open_weights(path: str | Path) -> Mapping[str, NDArray[Any]]:
    """The tensors of a safetensors file, or of a Hugging Face directory with one or several of them.

    Returns:
        A mapping from name to a read-only array that lies in the file; nothing is read until it is used.

    Raises:
        CheckpointError: no such file, a broken header, an index that names absent tensors.
    """
    path = _border.path("open_weights", "weights", path)
    if not os.path.isdir(path):
        return WeightsFile(path)
    if os.path.lexists(path / INDEX):
        return _open_indexed(path)
    return WeightsFile(path / SINGLE)


def write_weights(
    directory: str | Path, tensors: Iterable[tuple[str, NDArray[Any]]], max_shard_bytes: int = 4 << 30
) -> None:
    """Write tensors as `model.safetensors`, or as numbered files with an index when they exceed one shard.

    At most one shard is held in memory. Each file is replaced atomically; the index comes last.

    Raises:
        CheckpointError: what is given are no arrays by name.
        ResourceError: a file cannot be written.
    """
    directory = _border.path("write_weights", "a directory", directory)
    max_shard_bytes = _border.integer("write_weights", "max_shard_bytes", max_shard_bytes, 1, 1 << 62)
    shards: list[list[str]] = []
    try:
        total_bytes, part = _write_all_but_last(directory, shards, tensors, max_shard_bytes)
        if not shards:
            _write_file(directory / SINGLE, part)
            (directory / INDEX).unlink(missing_ok=True)  # of an older model in several files
            return
        shards.append(_write_part(directory, len(shards), part))
        _number_parts(directory, shards, total_bytes)
    finally:
        for i in range(len(shards)):
            (directory / _part_name(i)).unlink(missing_ok=True)


def _write_all_but_last(
    directory: Path,
    shards: list[list[str]],
    tensors: Iterable[tuple[str, NDArray[Any]]],
    max_shard_bytes: int,
) -> tuple[int, dict[str, NDArray[Any]]]:
    """Write every shard that is full, adding its names to `shards`; returns all bytes, and what is left."""
    total_bytes = 0
    part: dict[str, NDArray[Any]] = {}
    for name, tensor in _named(tensors):
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > max_shard_bytes:
            shards.append(_write_part(directory, len(shards), part))
            part = {}
        part[name] = np.ascontiguousarray(tensor)
        total_bytes += tensor.nbytes
    return total_bytes, part


def _named(tensors: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Names and arrays, one by one, each held to what a file can store.

    Raises:
        CheckpointError: something else, or a name that comes twice.
    """
    if isinstance(tensors, (str, Mapping, np.ndarray)) or not isinstance(tensors, Iterable):
        _border.refuse("write_weights", "tensors are pairs of name and array", shown(tensors), "pass a list")
    seen: set[str] = set()
    for pair in tensors:
        if not isinstance(pair, tuple) or len(pair) != 2:
            _border.refuse("write_weights", "tensors are pairs of name and array", shown(pair), "pass tuples")
        name, tensor = pair
        _border.text("write_weights", "a tensor's name", name)
        if name in seen or not isinstance(tensor, np.ndarray) or not is_storable(tensor.dtype):
            _border.refuse(
                "write_weights",
                "every name comes once, with an array of numbers that safetensors can hold",
                f"{shown(tensor)} for {shown(name)}",
                "correct it",
            )
        seen.add(name)
        yield name, tensor


class WeightsFile(Mapping[str, NDArray[Any]]):
    """One safetensors file in memory; the map lives as long as an array that points into it.

    Attributes:
        entries: what its header says, by name.

    Raises:
        CheckpointError: it is not whole safetensors; names the rule it breaks.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._map = _map_file(path)
            self.entries: Mapping[str, TensorEntry] = parse_header(self._map)
        except Unreadable as error:
            raise CheckpointError(
                f"[checkpoint.open_weights] weights must be a whole safetensors file; got {str(path)!r}: {error}; "
                "check the path, download or write it again"
            ) from None

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self.entries[name]
        bytes_ = np.frombuffer(self._map, np.uint8, entry.end - entry.begin, entry.begin)
        if bytes_.ctypes.data % entry.dtype.alignment:  # the format does not ask writers to align tensors
            bytes_ = bytes_.copy()
        return bytes_.view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _map_file(path: Path) -> mmap.mmap | bytes:
    """A regular file's bytes, mapped; none can be mapped of an empty one."""
    with open_regular(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file has nothing to map
            return b""
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from None


class _IndexedFiles(Mapping[str, NDArray[Any]]):
    """Several files behind one index."""

    def __init__(self, files: Mapping[str, WeightsFile]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._files[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open_indexed(directory: Path) -> Mapping[str, NDArray[Any]]:
    """The files that an index names, each tensor from the file that it says."""
    try:
        weight_map = read_json(directory / INDEX, _Index).weight_map
    except Unreadable as error:
        raise _index_error(directory, str(error)) from None
    names = sorted(set(weight_map.values()))
    for name in names:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise _index_error(directory, f"{shown(name)} is not the plain name of a file beside it")
    if SINGLE not in names and os.path.lexists(directory / SINGLE):
        raise _index_error(directory, f"{SINGLE} stands there too and is none of its files")
    opened = {name: WeightsFile(directory / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in opened[name]:
            raise _index_error(
                directory, f"it says that {shown(name)} holds {shown(tensor)}, which is not so"
            )
    for name in names:
        for tensor in opened[name]:
            if weight_map.get(tensor) != name:
                raise _index_error(directory, f"it does not say that {shown(name)} holds {shown(tensor)}")
    return _IndexedFiles({tensor: opened[name] for tensor, name in weight_map.items()})


def _index_error(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"[checkpoint.open_weights] {INDEX} must map every tensor to its file; got {str(directory)!r}: {reason}; "
        "download it again"
    )


def save_tensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file, with the mode that files of this process have.

    Raises:
        OSError: it cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode & 0o777
    try:
        save_file(dict(tensors), str(path), metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:  # the library's own kind for what the system refused
        raise OSError(str(error)) from None
    path.chmod(mode)  # the library makes a file that only its owner can read


def _write_file(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    replace_file(path, lambda temporary: save_tensors(temporary, tensors, {"format": "pt"}))


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
    replace_text(directory / INDEX, json.dumps(index, indent=2, sort_keys=True))
    (directory / SINGLE).unlink(missing_ok=True)  # of an older model in one file
