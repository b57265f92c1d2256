"""Writes safetensors files with one tensor in memory at a time. Each file appears complete or not
at all.

Names, shapes and dtypes of all tensors are known before any value, so headers and names of files
are decided first. Then tensors are fetched and written one by one. Tensors that a file cannot store
are rejected before anything is written. `transformers` can open the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tilewise.checkpoint.header import MAX_HEADER_BYTES, dtype_name, is_storable
from tilewise.checkpoint.tensors import FileTensor, LazyTensor, Tensor, read_array
from tilewise.checkpoint.weights import INDEX, SINGLE
from tilewise.core import CheckpointError
from tilewise.core.validation import Validator, shown
from tilewise.files.writing import HIDDEN, replace_file, replace_text, sync_directory, sync_file, writing
from tilewise.ir.graph import METADATA

__all__ = ["MAX_SHARD_BYTES", "save_tensors", "write_weights"]

MAX_SHARD_BYTES = 5 * 10**9
_ALIGNMENT = 8
_validate = Validator("checkpoint", CheckpointError)


def write_weights(
    directory: str | Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors as `model.safetensors`, or as numbered files with an index if they exceed one
    shard.

    Each file is replaced atomically. If there are several, they are replaced when all are written,
    the index last. One lazy tensor is in memory at a time.

    Args:
        directory: an existing directory.
        tensors: arrays by name, or tensors that are fetched one by one (`LazyTensor`, tensors in
            files).
        max_shard_bytes: maximum size of the tensors in a file. A larger tensor has its own file.

    Raises:
        CheckpointError: the argument is not a mapping of names to arrays.
        ResourceError: a file cannot be written. Existing files are kept.
    """
    directory = _validate.path("write_weights", "a directory", directory)
    max_shard_bytes = _validate.integer("write_weights", "max_shard_bytes", max_shard_bytes, 1, 1 << 62)
    shards = _cut(_named(tensors), max_shard_bytes)
    if len(shards) == 1:
        replace_file(directory / SINGLE, lambda path: save_tensors(path, dict(shards[0]), {"format": "pt"}))
        with writing(directory / INDEX):
            (directory / INDEX).unlink(missing_ok=True)  # left by an older model in several files
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    hidden = [directory / f"{HIDDEN}part-{name}" for name in names]
    try:
        for path, name, shard in zip(hidden, names, shards):
            with writing(directory / name):
                save_tensors(path, dict(shard), {"format": "pt"})
                sync_file(path)
        for path, name in zip(hidden, names):
            with writing(directory / name):
                path.replace(directory / name)
    finally:
        for path in hidden:
            path.unlink(missing_ok=True)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for _, tensor in shard)},
        "weight_map": {tensor: name for name, shard in zip(names, shards) for tensor, _ in shard},
    }
    replace_text(directory / INDEX, json.dumps(index, indent=2, sort_keys=True))
    with writing(directory / SINGLE):
        (directory / SINGLE).unlink(missing_ok=True)  # left by an older model in one file
        sync_directory(directory)


def _cut(tensors: Sequence[tuple[str, Tensor]], max_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Divide tensors, in order, among files up to the maximum size. There is at least one file."""
    shards: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor))
        size += tensor.nbytes
    return shards


def _named(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Names and tensors, checked against what a file can store.

    Raises:
        CheckpointError: a tensor cannot be stored, or a name appears twice.
    """
    if isinstance(tensors, (str, Mapping, np.ndarray)) or not isinstance(tensors, Iterable):
        _validate.invalid(
            "write_weights", "tensors are pairs of name and array", shown(tensors), "pass a list"
        )
    by_name: dict[str, Tensor] = {}
    for pair in tensors:
        if not isinstance(pair, tuple) or len(pair) != 2:
            _validate.invalid(
                "write_weights", "tensors are pairs of name and array", shown(pair), "pass tuples"
            )
        name, tensor = pair
        _validate.text("write_weights", "a tensor's name", name)
        is_tensor = isinstance(tensor, (np.ndarray, FileTensor, LazyTensor))
        if name in by_name or name == METADATA or not is_tensor or not is_storable(tensor.dtype):
            _validate.invalid(
                "write_weights",
                "every name comes once, with an array of numbers that safetensors can hold",
                f"{shown(tensor)} for {shown(name)}",
                "correct it",
            )
        _validate.without_mask("write_weights", shown(name), tensor)
        by_name[name] = tensor
    return list(by_name.items())


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file. Tensors are fetched one by one.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
        CheckpointError: a lazy tensor differs from its description, or the names are longer than a
            header allows.
    """
    order = sorted(
        tensors, key=lambda name: -tensors[name].dtype.itemsize
    )  # largest elements first, so that all tensors are aligned
    header: dict[str, object] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    if len(content) > MAX_HEADER_BYTES:
        _validate.invalid(
            "write_weights",
            f"a file's names and shapes must fit a header of {MAX_HEADER_BYTES} bytes",
            f"{len(content)} bytes for {len(order)} tensors",
            "shorten the names",
        )
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name in order:
            _write_elements(file, tensors[name])


def _write_elements(file: BinaryIO, tensor: Tensor) -> None:
    array = np.ascontiguousarray(read_array(tensor))
    file.write(array.reshape(-1).view(np.uint8).data)
