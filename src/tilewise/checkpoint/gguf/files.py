"""Opens GGUF files: one file, or all parts of a model in several files.

Tensors of plain dtypes become `FileTensor`s, tensors of blocks `QuantisedTensor`s, both under the
names of the file and read when they are used. `checkpoint.gguf.model` gives them the names of the
model family. Headers are parsed once per process and state of a file, because commands open a model
several times.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.gguf.header import MAGIC, Header, TensorInfo, Value, parse_header
from tilewise.checkpoint.open_file import OpenFile
from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.tensors import FileTensor
from tilewise.core import CheckpointError, ConfigError
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, open_regular
from tilewise.formats import WeightFormat

__all__ = ["GgufFiles", "find_gguf", "first_files", "open_gguf"]

_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_MAX_PARTS = 4096
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_LFS_POINTER = b"vers"  # of b"version https://git-lfs.github.com/spec/v1"
_NOT_MODELS = ("mmproj", "imatrix")  # projectors of images, and statistics of quantisation


@dataclass(frozen=True)
class GgufFiles:
    """A model in one GGUF file or several.

    Attributes:
        path: the file, or the first of several.
        values: the key-values of the (first) file.
        parts: each file with its tensors.
    """

    path: Path
    values: Mapping[str, Value]
    parts: tuple[tuple[Path, Mapping[str, TensorInfo]], ...]

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """The tensors of all files, by name."""
        return {name: info for _, infos in self.parts for name, info in infos.items()}

    def tensors(self) -> dict[str, FileTensor | QuantisedTensor]:
        """The tensors of all files, under the files' names. Files are open while one is in use.

        Raises:
            CheckpointError: a file cannot be opened, or has become shorter.
        """
        tensors: dict[str, FileTensor | QuantisedTensor] = {}
        for path, infos in self.parts:
            try:
                file = OpenFile(path, open_regular(path))
            except Unreadable as error:
                raise _unreadable(path, error) from None
            size, end = (
                os.fstat(file.descriptor).st_size,
                max((info.end for info in infos.values()), default=0),
            )
            if size < end:
                raise file.unreadable("it has become shorter")
            tensors |= {name: _tensor(file, name, info) for name, info in infos.items()}
        return tensors


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path: a file with GGUF's magic number or suffix; or the only model in a
    directory without other weights. None if there is no such file.

    Raises:
        ConfigError: a directory has several models.
    """
    if not os.path.isdir(path):
        is_named = path.suffix.lower() == ".gguf" and os.path.lexists(path)
        return path if is_named or _first_bytes(path) == MAGIC else None
    names: list[str] = []
    with suppress(OSError):
        names = sorted(os.listdir(path))
    if any(name.endswith(_OTHER_WEIGHTS) for name in names):
        return None
    files = first_files(names)
    if len(files) > 1:
        raise ConfigError(
            f"[checkpoint.gguf] a directory of GGUF files must have one model, or a file must be named; got "
            f"{str(path)!r} with {', '.join(shown(name) for name in files[:16])}; name one of these files"
        )
    return path / files[0] if files else None


def first_files(names: list[str]) -> list[str]:
    """Those of a directory's files that are a model's only or first GGUF file."""
    models = [name for name in names if name.lower().endswith(".gguf")]
    models = [name for name in models if not any(word in name.lower() for word in _NOT_MODELS)]
    parts = {name: _PART.fullmatch(name) for name in models}
    return [name for name, part in parts.items() if part is None or int(part[2]) == 1]


def open_gguf(path: Path) -> GgufFiles:
    """Open the model at a path from `find_gguf`, with all of its parts.

    Raises:
        ConfigError: the file is no GGUF file.
        CheckpointError: a file is damaged or incomplete, a part is missing, or a type of tensors is
            not supported. The message names the file and the rule.
    """
    try:
        header = _header(path)
        parts = _part_paths(path, header)
        headers = [_header(part) for part in parts]
    except Unreadable as error:
        begin = _first_bytes(path)
        if begin is not None and begin != MAGIC:
            raise ConfigError(
                f"[checkpoint.gguf] a .gguf file must begin with {MAGIC!r}; got {begin!r} in {str(path)!r}; "
                + (
                    "it is a Git LFS pointer: run git lfs pull"
                    if begin == _LFS_POINTER
                    else "the download is damaged or truncated: repeat it"
                )
            ) from None
        raise _unreadable(path, error) from None
    files = GgufFiles(parts[0], headers[0].values, tuple((p, h.tensors) for p, h in zip(parts, headers)))
    _check_parts(files, headers)
    return files


def _part_paths(path: Path, header: Header) -> list[Path]:
    """All files of the model of which `path` is one.

    Raises:
        Unreadable: the file is a part, and its name does not say which.
    """
    count = header.values.get("split.count", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count <= 1:
        return [path]
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count or not 1 <= int(match[2]) <= count <= _MAX_PARTS:
        raise Unreadable(
            f"it is one of {count} parts, so its name must end in -NNNNN-of-{min(count, 99999):05d}.gguf; give it the "
            "name that it had"
        )
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, count + 1)]


def _check_parts(files: GgufFiles, headers: list[Header]) -> None:
    """Check that the files are the parts of one model, in order.

    Raises:
        CheckpointError: they are not.
    """
    if len(headers) == 1:
        return
    names: set[str] = set()
    for number, ((path, infos), header) in enumerate(zip(files.parts, headers)):
        place = (header.values.get("split.no"), header.values.get("split.count"))
        if place != (number, len(headers)):
            reason = f"its split.no and split.count are {shown(place)}, not {number} and {len(headers)}"
            raise _unreadable(path, Unreadable(reason))
        if twice := sorted(names.intersection(infos)):
            raise _unreadable(path, Unreadable(f"tensor {shown(twice[0])} is in an earlier part too"))
        names.update(infos)
    total = files.values.get("split.tensors.count", len(names))
    if total != len(names):
        raise _unreadable(files.path, Unreadable(f"its parts have {len(names)} tensors, not {shown(total)}"))


def _header(path: Path) -> Header:
    """The header of a file, parsed once for each state of the file.

    Raises:
        Unreadable: the file cannot be read, or its header is invalid.
    """
    with open_regular(path) as stream:
        stat = os.fstat(stream.fileno())
        return _parsed(str(path), (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=4)
def _parsed(path: str, state: tuple[int, ...]) -> Header:
    with open_regular(path) as stream:

        def read(begin: int, end: int) -> bytes:
            try:
                return os.pread(stream.fileno(), end - begin, begin)
            except OSError as error:
                raise Unreadable(error.strerror or str(error)) from None

        return parse_header(read, os.fstat(stream.fileno()).st_size)


def _tensor(file: OpenFile, name: str, info: TensorInfo) -> FileTensor | QuantisedTensor:
    rows = info.shape[0] if info.shape else 1
    row_bytes = (info.end - info.begin) // rows
    if not isinstance(info.kind, WeightFormat):
        return FileTensor(file, name, info.kind, info.shape, info.begin, row_bytes)
    if len(info.shape) != 2:
        reason = f"tensor {shown(name)} of type {info.kind} has the shape {list(info.shape)} and is no matrix"
        raise _unreadable(file.path, Unreadable(reason))

    def read_blocks(first: int, count: int) -> NDArray[np.uint8]:
        blocks = np.empty((count, row_bytes), np.uint8)
        file.read_into(blocks.reshape(-1).data, info.begin + first * row_bytes)
        return blocks

    shape = (info.shape[0], info.shape[1])
    return QuantisedTensor(file, name, info.kind, shape, read_blocks, info.begin)


def _first_bytes(path: Path) -> bytes | None:
    """The bytes at the place of the magic number; None if the file cannot be read."""
    with suppress(Unreadable, OSError), open_regular(path) as stream:
        return stream.read(len(MAGIC))
    return None


def _unreadable(path: Path, error: Unreadable) -> CheckpointError:
    return CheckpointError(
        f"[checkpoint.gguf] a GGUF file must be complete and of a supported kind; got {str(path)!r}: {error}; "
        "download it again, or choose another file of the model"
    )
