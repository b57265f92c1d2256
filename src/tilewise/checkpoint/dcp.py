"""Directories of PyTorch's distributed checkpoints (DCP): files with chunks of tensors, and a file
`.metadata` that says where each chunk is.

`open_distributed` returns the tensors by name. Each device reads its own part of a tensor from the
chunks that contain it. `.metadata` and the descriptions in chunks are pickles. They are parsed as
data (`pickles`) and never executed. Chunks that do not cover their tensor exactly, files outside of
the directory, and entries that are not tensors are rejected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.checkpoint.boxes import Box, misfit
from tilewise.checkpoint.open_file import OpenFile
from tilewise.checkpoint.pickles import MAX_PICKLE_BYTES, Name, Record, parse_pickle, worded
from tilewise.checkpoint.tensors import FileTensor, PartedTensor, TensorPart
from tilewise.checkpoint.torch_files import Storages, dtype_of, sizes_of
from tilewise.core import CheckpointError
from tilewise.core.validation import Validator, shown
from tilewise.files.reading import Unreadable, open_regular, read_whole

__all__ = ["is_distributed", "open_distributed"]

_METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_MAX_CHUNKS = 1 << 14  # of a tensor
_MAX_CHUNK_WORDS = 1 << 16  # bytes of a chunk's description; bounds the memory of many large ones
_validate = Validator("checkpoint", CheckpointError)


def is_distributed(directory: str | Path) -> bool:
    """Whether a directory is a distributed checkpoint, by its files."""
    return os.path.lexists(os.path.join(directory, _METADATA))


def open_distributed(
    directory: str | Path, part: str | None = None
) -> Mapping[str, FileTensor | PartedTensor]:
    """The tensors of a distributed checkpoint. They are read on use, and nothing in the files is
    executed.

    Args:
        directory: the directory with `.metadata`.
        part: prefix of the names of the wanted tensors, such as `model`. The prefix is removed from
            the names, and other entries are ignored. If None, all entries must be tensors.

    Raises:
        CheckpointError: the directory is not a distributed checkpoint, or is damaged.
    """
    root = _validate.path("open_distributed", "a directory", directory)
    if part is not None:
        _validate.text("open_distributed", "part", part)
    try:
        return _Directory(root, parse_pickle(read_whole(root / _METADATA, MAX_PICKLE_BYTES))).tensors(part)
    except Unreadable as error:
        raise CheckpointError(
            f"[checkpoint.open_distributed] a distributed checkpoint must hold {_METADATA} and whole tensors; got "
            f"{str(root)!r}: {error}; save it again"
        ) from None


class _Directory:
    """The content of `.metadata`, and the files next to it."""

    def __init__(self, root: Path, metadata: Any) -> None:
        fields = _state(metadata, "Metadata")
        described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        if not isinstance(described, dict) or not isinstance(stored, dict):
            raise Unreadable("its metadata do not describe tensors")
        self._root, self._described = root, described
        self._places = dict(_places(stored))
        self._files: dict[str, OpenFile] = {}

    def tensors(self, part: str | None) -> dict[str, FileTensor | PartedTensor]:
        prefix = "" if part is None else f"{part}."
        tensors: dict[str, FileTensor | PartedTensor] = {}
        for name, described in self._described.items():
            if not isinstance(name, str):
                raise Unreadable(f"names of tensors must be text; got {worded(name)}")
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = self._tensor(name, described)
        if part is not None and not tensors:
            raise Unreadable(f"it has no tensor whose name begins with {shown(prefix)}")
        return tensors

    def _tensor(self, name: str, described: Any) -> FileTensor | PartedTensor:
        if isinstance(described, Record) and described.name == Name(_MODULE, "BytesStorageMetadata"):
            raise Unreadable(
                f"it holds {shown(name)}, which is not a tensor; name the part that is the model"
            )
        fields = _state(described, "TensorStorageMetadata")
        properties = fields.get("properties")
        if not isinstance(properties, Record) or properties.name != Name(_MODULE, "TensorProperties"):
            raise Unreadable(f"{shown(name)} has no dtype")
        state = properties.state
        dtype = dtype_of(state[0] if isinstance(state, tuple) and state else None)
        shape, chunks = sizes_of(fields.get("size")), list(_chunks(name, fields.get("chunks")))
        wrong = misfit(shape, chunks)
        if wrong is not None:
            raise Unreadable(f"the chunks of {shown(name)} do not cover it once: {wrong.words}")
        tensors = [self._chunk(name, chunk, dtype) for chunk in chunks]
        if len(tensors) == 1:
            return tensors[0]
        return PartedTensor(shape, dtype, tuple(map(TensorPart, chunks, tensors)))

    def _chunk(self, name: str, chunk: Box, dtype: np.dtype[Any]) -> FileTensor:
        place = self._places.get((name, chunk.begin))
        if place is None:
            raise Unreadable(f"its metadata have no place for the chunk of {shown(name)} at {chunk.begin}")
        fields = _state(place, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
        file, begin, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if fields.get("transform_descriptors"):
            raise Unreadable(f"{shown(name)} is compressed or encrypted")
        opened = self._open(file)
        end = opened.stream.seek(0, 2)
        if (
            not isinstance(begin, int)
            or not isinstance(length, int)
            or not 0 <= begin <= begin + length <= end
        ):
            raise Unreadable(f"the chunk of {shown(name)} at {chunk.begin} lies outside of its file")
        storages = Storages(opened, begin, length, _MAX_CHUNK_WORDS)
        tensor = storages.tensor(name, storages.content)
        if (tensor.shape, tensor.dtype) != (chunk.sizes, dtype):
            raise Unreadable(
                f"the chunk of {shown(name)} at {chunk.begin} is {tensor.dtype} {list(tensor.shape)} in its file"
            )
        return tensor

    def _open(self, name: Any) -> OpenFile:
        """Open a file next to the metadata."""
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise Unreadable(f"{worded(name)} is not the name of a file in this directory")
        if name not in self._files:
            path = self._root / name
            try:
                self._files[name] = OpenFile(path, open_regular(path))
            except Unreadable as error:
                raise Unreadable(f"{shown(name)}: {error}") from None
        return self._files[name]


def _state(record: Any, name: str, module: str = _MODULE) -> dict[str, Any]:
    """The fields of a record with this name."""
    if (
        not isinstance(record, Record)
        or record.name != Name(module, name)
        or not isinstance(record.state, dict)
    ):
        raise Unreadable(f"its metadata lack a {name}")
    return record.state


def _places(stored: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, tuple[int, ...]], Any]]:
    """The places of chunks, by tensor and offsets."""
    for key, place in stored.items():
        fields = _state(key, "MetadataIndex")
        name, offset = fields.get("fqn"), fields.get("offset")
        if not isinstance(name, str):
            raise Unreadable("its metadata have a chunk without a tensor's name")
        if offset is not None:
            yield (name, sizes_of(offset)), place


def _chunks(name: str, values: Any) -> Iterator[Box]:
    if not isinstance(values, list) or not 0 < len(values) <= _MAX_CHUNKS:
        raise Unreadable(f"{shown(name)} must have 1 to {_MAX_CHUNKS} chunks")
    for value in values:
        fields = _state(value, "ChunkStorageMetadata")
        yield Box(sizes_of(fields.get("offsets")), sizes_of(fields.get("sizes")))
