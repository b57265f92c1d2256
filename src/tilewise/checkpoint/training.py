"""Training checkpoints: `step-N` directories, each with its state and what is known of it.

A checkpoint holds the state of a model (parameters, optimizer) and the configuration that decides its values. It is
written under a hidden name and renamed, so whatever moment a process is killed at, an older or a newer checkpoint
stands whole. checkpoint.json has a SHA-256 of every tensor and one of everything that it says itself, so a flipped
bit or an edited step is found: listing looks at names, sizes and metadata, loading at every byte. Loading checks
before it trusts, names the setting that differs, and goes back to an older checkpoint only when the newer one is
damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from tilewise.checkpoint.files import remove_directory, remove_leftovers, replace_directory
from tilewise.checkpoint.header import dtype_name, is_storable
from tilewise.checkpoint.shards import save_tensors
from tilewise.checkpoint.tensors import FileTensor, LazyTensor, WeightsFile
from tilewise.core import CheckpointError
from tilewise.core.border import Border, shown
from tilewise.core.reading import Unreadable, read_json, read_whole
from tilewise.core.writing import writing

__all__ = [
    "DamagedCheckpoint",
    "OpenCheckpoint",
    "Progress",
    "TrainingState",
    "checkpoint_path",
    "checkpoint_paths",
    "has_checkpoints",
    "latest_checkpoint",
    "load_checkpoint",
    "load_latest",
    "open_checkpoint",
    "save_checkpoint",
]

Progress = Callable[[int, int], object]

_STATE = "state.safetensors"
_META = "checkpoint.json"
_TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 512 << 20
_STEP = re.compile(r"step-([0-9]{8,18})")
_STEP_TENSOR = "optimizer.step"
_LAST_STEP = 10**18 - 1  # the longest name that `_STEP` matches
_border = Border("checkpoint", CheckpointError)


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not whole; an older one may be.

    Attributes:
        reason: what is wrong, without where.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"[checkpoint.load_checkpoint] a checkpoint must be whole; got {str(path)!r}: {reason}; "
            "resume from an older one"
        )
        self.reason = reason


class _Tensor(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: list[int]
    sha256: str


class _Meta(BaseModel):
    """checkpoint.json. `digest` covers everything else in it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: Literal[3]
    step: Annotated[int, Field(ge=0)]
    config: dict[str, Any]
    tensors: dict[str, _Tensor]
    tokenizer: str | None = None
    digest: str = ""


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        tensors: the model's `state_dict()`; read lazily after loading.
        tokenizer: content of tokenizer.json, so that a checkpoint alone becomes a model directory; not read by loading.
    """

    step: int
    tensors: Mapping[str, NDArray[Any] | FileTensor]
    tokenizer: bytes | None = None


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose metadata, names and sizes are whole; its tensors are read when they are asked for.

    Attributes:
        path: of it.
        step: optimizer steps done.
        config: everything that must be equal when training goes on.
        tensors: by name.
        checksums: of the tensors' bytes, by name.
        tokenizer: checksum of the tokenizer.json beside them; None where there is none.
    """

    path: Path
    step: int
    config: Mapping[str, Any]
    tensors: WeightsFile
    checksums: Mapping[str, str]
    tokenizer: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.begin for entry in self.tensors.entries.values())

    def verify(self, on_progress: Progress | None = None) -> None:
        """Read every byte.

        Args:
            on_progress: told the bytes read, and those of all tensors.

        Raises:
            DamagedCheckpoint: a tensor is not the one that was saved; names it.
        """
        done, total = 0, self.nbytes
        for name, entry in self.tensors.entries.items():
            try:
                found = _checksum(np.asarray(self.tensors[name]))
            except CheckpointError as error:
                raise DamagedCheckpoint(self.path, f"tensor {shown(name)} in {_STATE}: {error}") from None
            if found != self.checksums[name]:
                raise DamagedCheckpoint(
                    self.path, f"tensor {shown(name)} in {_STATE} does not have its checksum"
                )
            done += entry.end - entry.begin
            if on_progress is not None:
                on_progress(done, total)
        if self.tokenizer is not None and _checksum_of_file(self.path) != self.tokenizer:
            raise DamagedCheckpoint(self.path, f"{_TOKENIZER} does not have its checksum")


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    root = _border.path("checkpoint_path", "a directory", directory)
    return root / f"step-{_border.integer('checkpoint_path', 'a step', step, 0, _LAST_STEP):08d}"


def save_checkpoint(
    directory: str | Path,
    state: TrainingState,
    config: Mapping[str, Any],
    keep_last: int = 2,
    on_progress: Progress | None = None,
) -> Path:
    """Write `step-N` into `directory`, remove all but the newest `keep_last`.

    A whole `step-N` with the same content is kept as it is, so that none is missing while it would be replaced.

    Args:
        config: everything that must be equal when training goes on, as JSON can hold it.
        on_progress: told the bytes done and in all, each of which is read for its checksum and written; what it raises
            leaves nothing behind.

    Returns:
        The new checkpoint's path.

    Raises:
        CheckpointError: the state counts other steps than `state.step`.
        ResourceError: it cannot be written; older checkpoints are kept.
    """
    root = _border.path("save_checkpoint", "a directory", directory)
    _border.instance("save_checkpoint", "a state", state, TrainingState, "pass TrainingState(step, tensors)")
    step = _border.integer("save_checkpoint", "a step", state.step, 0, _LAST_STEP)
    keep_last = _border.integer("save_checkpoint", "keep_last", keep_last, 1, _LAST_STEP)
    tensors = _storable(state.tensors)
    if state.tokenizer is not None:
        _border.instance(
            "save_checkpoint", "a tokenizer", state.tokenizer, bytes, "pass the bytes of its file"
        )
    work = _Work(2 * sum(tensor.nbytes for tensor in tensors.values()), on_progress)
    meta = _describe(step, config, tensors, state.tokenizer, work)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    path = checkpoint_path(root, step)
    problem = _wrong_step(meta, path, tensors)
    if problem is not None:
        raise CheckpointError(
            f"[checkpoint.save_checkpoint] a state must be of the step it is saved as; got {problem}; "
            "save it as its own step"
        )

    def write(temporary: Path) -> None:
        save_tensors(temporary / _STATE, {name: work.counted(tensor) for name, tensor in tensors.items()})
        if state.tokenizer is not None:
            (temporary / _TOKENIZER).write_bytes(state.tokenizer)
        (temporary / _META).write_text(json.dumps(meta.model_dump(), indent=2) + "\n", encoding="utf-8")

    if not _holds(path, meta):
        replace_directory(path, write)
    _remove_older(root, path, keep_last - 1)
    return path


@dataclass
class _Work:
    """How far a checkpoint is.

    Attributes:
        total: bytes to be worked on.
        show: told of it.
        done: bytes worked on.
    """

    total: int
    show: Progress | None
    done: int = 0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.show is not None:
            self.show(self.done, self.total)

    def counted(self, tensor: NDArray[Any]) -> LazyTensor:
        """A tensor that counts when it is written."""

        def fetch() -> NDArray[Any]:
            self.add(tensor.nbytes)
            return tensor

        return LazyTensor(tensor.shape, tensor.dtype, fetch)


def _storable(tensors: Mapping[str, NDArray[Any] | FileTensor]) -> dict[str, NDArray[Any]]:
    """Tensors as a file can hold them.

    Raises:
        CheckpointError: something else than arrays by name, or of a type that safetensors lacks.
    """
    given = _border.mapping("save_checkpoint", "tensors", tensors, "arrays")
    for name, tensor in given.items():
        if not isinstance(tensor, (np.ndarray, FileTensor)) or not is_storable(tensor.dtype):
            _border.refuse(
                "save_checkpoint",
                "tensors are arrays of numbers that safetensors can hold",
                f"{shown(tensor)} for {shown(name)}",
                "convert it",
            )
    return {name: np.ascontiguousarray(tensor) for name, tensor in given.items()}


def _remove_older(root: Path, newest: Path, num_kept: int) -> None:
    """Remove what is older than `newest`, but for some whole ones; what is newer is another matter."""
    for old in reversed(_steps(root)[: _steps(root).index(newest)]):
        if num_kept > 0 and _is_listed(old):
            num_kept -= 1
        else:
            remove_directory(old)


def has_checkpoints(directory: str | Path) -> bool:
    """Whether there are checkpoints, whole or not."""
    return bool(_steps(_border.path("has_checkpoints", "a directory", directory)))


def checkpoint_paths(directory: str | Path) -> list[Path]:
    """All checkpoints in a directory, whole or not, oldest first."""
    return _steps(_border.path("checkpoint_paths", "a directory", directory))


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest checkpoint whose metadata, names and sizes are whole; its content is looked at when it is loaded."""
    root = _border.path("latest_checkpoint", "a directory", directory)
    return next((path for path in reversed(_steps(root)) if _is_listed(path)), None)


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """A checkpoint of whatever configuration; everything is checked but the tensors' bytes (`verify`).

    Raises:
        DamagedCheckpoint: missing, truncated or changed files; names what is wrong.
    """
    path = _border.path("open_checkpoint", "a checkpoint", path)
    meta, tensors = _open(path)
    checksums = {name: tensor.sha256 for name, tensor in meta.tensors.items()}
    return OpenCheckpoint(path, meta.step, meta.config, tensors, checksums, meta.tokenizer)


def load_checkpoint(
    path: str | Path, config: Mapping[str, Any], on_progress: Progress | None = None
) -> TrainingState:
    """Read a checkpoint after checking every byte of it, and that it belongs to this configuration.

    Args:
        config: of the run that goes on.
        on_progress: told the bytes checked, and those of all tensors.

    Raises:
        DamagedCheckpoint: missing, truncated or changed files; names what is wrong.
        CheckpointError: another configuration; names what differs.
    """
    path = _border.path("load_checkpoint", "a checkpoint", path)
    _border.mapping("load_checkpoint", "a configuration", config, "values")
    opened = open_checkpoint(path)
    differences = _differences(opened.config, config)
    if differences:
        raise CheckpointError(
            "[checkpoint.load_checkpoint] model, data and optimizer must be those the checkpoint was made with; "
            f"got {', '.join(differences)} in {path}; restore the configuration or start anew"
        )
    opened.verify(on_progress)
    return TrainingState(opened.step, opened.tensors)


def load_latest(
    directory: str | Path,
    config: Mapping[str, Any],
    report: Callable[[str], None],
    on_progress: Progress | None = None,
) -> tuple[Path, TrainingState]:
    """Load the newest checkpoint that is whole.

    Args:
        report: told of every newer one that is not, and what is used instead.
        on_progress: as for `load_checkpoint`.

    Returns:
        The checkpoint's path and content.

    Raises:
        CheckpointError: none is whole, or the newest one that is belongs to another configuration.
    """
    damaged: list[str] = []
    if not callable(report):
        _border.refuse("load_latest", "report must be a function", shown(report), "pass one of a text")
    for path in reversed(_steps(_border.path("load_latest", "a directory", directory))):
        try:
            state = load_checkpoint(path, config, on_progress)
        except DamagedCheckpoint as error:
            damaged.append(f"{path.name} is damaged ({error.reason})")
            continue
        for text in damaged:
            report(f"checkpoint {text}; going on from {path.name} instead")
        return path, state
    raise CheckpointError(
        f"[checkpoint.load_latest] going on needs a whole checkpoint; got {', '.join(damaged) or 'none'} in "
        f"{str(directory)!r}; start anew in another directory"
    )


def _describe(
    step: int,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    tokenizer: bytes | None,
    work: _Work,
) -> _Meta:
    """The metadata of a state, digest included."""
    described: dict[str, _Tensor] = {}
    for name, tensor in tensors.items():
        work.add(tensor.nbytes)
        sha256 = _checksum(tensor)
        described[name] = _Tensor(dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), sha256=sha256)
    settings = dict(_border.json("save_checkpoint", "a configuration", config))
    words = None if tokenizer is None else hashlib.sha256(tokenizer).hexdigest()
    meta = _Meta(version=3, step=step, config=settings, tensors=described, tokenizer=words)
    return meta.model_copy(update={"digest": _digest(meta)})


def _checksum(tensor: NDArray[Any]) -> str:
    """Of a tensor's bytes; its name, dtype and shape are in the metadata's digest."""
    return hashlib.sha256(tensor.reshape(-1).view(np.uint8).data).hexdigest()


def _checksum_of_file(path: Path) -> str:
    """Of a checkpoint's tokenizer."""
    try:
        return hashlib.sha256(read_whole(path / _TOKENIZER, _MAX_TOKENIZER_BYTES)).hexdigest()
    except Unreadable as error:
        raise DamagedCheckpoint(path, f"{_TOKENIZER}: {error}") from None


def _digest(meta: _Meta) -> str:
    """Of everything the metadata say, in one spelling."""
    content = json.dumps(meta.model_dump(exclude={"digest"}), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def _open(path: Path) -> tuple[_Meta, WeightsFile]:
    """Metadata and tensors of a checkpoint, everything checked but the tensors' bytes.

    Raises:
        DamagedCheckpoint: they do not fit together.
    """
    try:
        meta = read_json(path / _META, _Meta)
    except Unreadable as error:
        raise DamagedCheckpoint(path, f"{_META}: {error}") from None
    if _digest(meta) != meta.digest:
        raise DamagedCheckpoint(path, f"{_META} does not have its own checksum")
    try:
        tensors = WeightsFile(path / _STATE)
    except CheckpointError as error:
        raise DamagedCheckpoint(path, str(error)) from None
    found = {name: (dtype_name(entry.dtype), list(entry.shape)) for name, entry in tensors.entries.items()}
    if found != {name: (tensor.dtype, tensor.shape) for name, tensor in meta.tensors.items()}:
        raise DamagedCheckpoint(path, f"{_STATE} holds other tensors than {_META} says")
    problem = _wrong_step(meta, path, tensors)
    if problem is not None:
        raise DamagedCheckpoint(path, problem)
    return meta, tensors


def _wrong_step(meta: _Meta, path: Path, tensors: Mapping[str, NDArray[Any] | FileTensor]) -> str | None:
    """How directory, metadata and state disagree about the step; None when they do not."""
    counted = (
        np.asarray(tensors[_STEP_TENSOR]).reshape(-1).tolist() if _STEP_TENSOR in tensors else [meta.step]
    )
    if path.name == f"step-{meta.step:08d}" and counted == [meta.step]:
        return None
    return f"{path.name}, whose metadata say step {meta.step} and whose state counts {shown(counted)}"


def _is_listed(path: Path) -> bool:
    try:
        _open(path)
    except DamagedCheckpoint:
        return False
    return True


def _holds(path: Path, meta: _Meta) -> bool:
    """Whether a whole checkpoint with this content stands there."""
    try:
        return _open(path)[0].digest == meta.digest and load_checkpoint(path, meta.config).step == meta.step
    except CheckpointError:
        return False


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Every setting that differs, as `optimizer.lr = 0.1 instead of 0.2`."""
    before, after = dict(_flat(then)), dict(_flat(now))
    return [
        f"{key} = {after.get(key, 'nothing')!s:.20} instead of {before.get(key, 'nothing')!s:.20}"
        for key in {**after, **before}
        if key not in before or key not in after or before[key] != after[key]
    ]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings under dotted names; a mapping is taken apart, everything else is a value."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _steps(root: Path) -> list[Path]:
    """All `step-N` directories, oldest first."""
    try:
        names = os.listdir(root)
    except (OSError, ValueError):  # not there, or no name that the system takes: what is saved there says so
        names = []
    found = [(int(match[1]), root / name) for name in names if (match := _STEP.fullmatch(name))]
    return [path for _, path in sorted(found)]
