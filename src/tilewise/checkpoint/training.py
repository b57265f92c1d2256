"""Training checkpoints: directories `step-N` with the state of a run and its manifest.

A checkpoint has the parameters, the optimizer states and the configuration that determines their
values. Each device that trained writes a file with its own parts of every tensor. A checkpoint is
written under a hidden name and renamed, so at least one complete checkpoint exists whenever the
process is killed. checkpoint.json, the manifest, has a SHA-256 of every part and of its own
content, so a flipped bit or an edited step is detected. Listing checkpoints reads names, sizes and
metadata. Loading a checkpoint reads and checks every byte. An error names the setting or the file.
An older checkpoint is used only if all newer ones are damaged.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from tilewise.checkpoint.device_files import (
    DeviceFile,
    assemble,
    damages,
    describe,
    open_device_files,
    write_device_files,
)
from tilewise.checkpoint.files import remove_directory, remove_leftovers, replace_directory
from tilewise.checkpoint.manifest import (
    MANIFEST,
    ConfigChange,
    EvaluationRecord,
    Manifest,
    ModelRecord,
    parse_manifest,
    read_manifest,
)
from tilewise.checkpoint.parts import make_parts
from tilewise.checkpoint.tensors import FileTensor, PartedTensor
from tilewise.core import CheckpointError, ResourceError
from tilewise.core.mesh import MAX_DEVICES
from tilewise.core.validation import Validator, bare, shown
from tilewise.files.reading import Forbidden, Unreadable, first_problem, read_whole
from tilewise.files.writing import writing

__all__ = [
    "RENAMED_SETTINGS",
    "STEP_NAME",
    "DamagedCheckpoint",
    "FinishedModel",
    "OpenCheckpoint",
    "OtherConfiguration",
    "Progress",
    "TrainingState",
    "checkpoint_path",
    "checkpoint_paths",
    "config_changes",
    "describe_changes",
    "flat_settings",
    "has_checkpoints",
    "latest_checkpoint",
    "load_checkpoint",
    "load_latest",
    "open_checkpoint",
    "save_checkpoint",
]

Progress = Callable[[int, int], object]

_TOKENIZER = "tokenizer.json"
_MODEL = "model"  # folder of the finished model's files
_MAX_FILE_BYTES = 512 << 20
STEP_NAME = re.compile(r"step-([0-9]{8,18})")
_STEP_TENSOR = "optimizer.step"
_LAST_STEP = 10**18 - 1  # the longest name that `STEP_NAME` matches
_validate = Validator("checkpoint", CheckpointError)


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is incomplete or changed; an older one may be valid.

    Attributes:
        reason: what is wrong, without the path.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"[checkpoint.load_checkpoint] a checkpoint must be complete and unchanged; got {str(path)!r}: {reason}; "
            "resume from an older one"
        )
        self.reason = reason


class OtherConfiguration(CheckpointError):
    """A checkpoint that was written with another configuration.

    Attributes:
        path: path of the checkpoint.
        changes: the settings that differ: `old` is the checkpoint's value.
    """

    def __init__(self, path: Path, changes: Sequence[ConfigChange]) -> None:
        super().__init__(
            "[checkpoint.load_checkpoint] model, data and optimizer must equal those of the checkpoint; "
            f"got {describe_changes(changes)} in {path}; restore the configuration or train in a new directory"
        )
        self.path, self.changes = path, tuple(changes)


def describe_changes(changes: Sequence[ConfigChange]) -> str:
    """Changes as text, each in the form `optimizer.lr = 0.1 instead of 0.2`."""
    return ", ".join(
        f"{bare(c.key)} = {_value_in_words(c.new)} instead of {_value_in_words(c.old)}" for c in changes
    )


def _value_in_words(value: object) -> str:
    return "nothing" if value is None else bare(value, 20)


@dataclass(frozen=True)
class FinishedModel:
    """What a checkpoint needs besides its parameters, so that a model directory can be made of it.

    Attributes:
        files: content by name of all files of the directory except weights (`model_files`).
        dtypes: by parameter, the dtype of the directory's weights, as named in safetensors (`F32`,
            `BF16`).
    """

    files: Mapping[str, bytes]
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingState:
    """The content of a checkpoint.

    Attributes:
        step: optimizer steps done.
        tensors: tensors from `GraphInstance.copy_state`, with the parts of each device. A whole
            tensor belongs to the first device. Tensors of a loaded checkpoint are read lazily.
        model: the finished model. Loading does not read it.
        mesh: axes of the device mesh; empty for one device.
        changes: changes of the configuration since the run began, in order.
        evaluation: what the run needs for its best model and for early stopping; None if it uses
            neither.
    """

    step: int
    tensors: Mapping[str, NDArray[Any] | FileTensor | PartedTensor]
    model: FinishedModel | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    changes: Sequence[ConfigChange] = ()
    evaluation: EvaluationRecord | None = None


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose metadata, names and sizes are valid; its tensors are read on use.

    Attributes:
        path: path of the checkpoint.
        step: number of optimizer steps done.
        config: everything that must be equal when training resumes.
        mesh: axes of the device mesh that wrote the checkpoint.
        tensors: tensors by name.
        files: files of the devices.
        model: checksums of the finished model's files, and the dtypes of its weights; None if the
            checkpoint was saved without a finished model.
        tokenizer: checksum of the tokenizer.json in the checkpoint. Only checkpoints from before
            `model` existed have it.
        changes: changes of the configuration since the run began, in order.
        evaluation: see `TrainingState`.
    """

    path: Path
    step: int
    config: Mapping[str, Any]
    mesh: Mapping[str, int]
    tensors: Mapping[str, FileTensor | PartedTensor]
    files: tuple[DeviceFile, ...]
    model: ModelRecord | None
    tokenizer: str | None
    changes: tuple[ConfigChange, ...] = ()
    evaluation: EvaluationRecord | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self.files)

    def verify(self, on_progress: Progress | None = None) -> None:
        """Read every byte, several files at a time.

        Args:
            on_progress: called with the number of bytes read and of all bytes, from other threads,
                one call at a time.

        Raises:
            DamagedCheckpoint: files differ from what was saved. The message names the files, and a
                tensor of each.
            CheckpointError: `on_progress` is not a function.
        """
        _validate.function("verify", "on_progress", on_progress)
        damage = damages(self.files, _Work(self.nbytes, on_progress).add)
        if damage is not None:
            raise DamagedCheckpoint(self.path, damage)
        if self.tokenizer is not None:
            self._read_file(_TOKENIZER, self.tokenizer)
        self.read_model()

    def read_model(self) -> FinishedModel | None:
        """Read the files of the checkpoint's finished model. None if the checkpoint was saved
        without one.

        Raises:
            DamagedCheckpoint: a file is missing or differs from what was saved. The message names
                the file.
        """
        if self.model is None:
            return None
        files = {
            name: self._read_file(f"{_MODEL}/{name}", checksum) for name, checksum in self.model.files.items()
        }
        return FinishedModel(files, self.model.dtypes)

    def _read_file(self, name: str, checksum: str) -> bytes:
        """The content of a file of the checkpoint, after comparing its checksum."""
        try:
            content = read_whole(self.path / name, _MAX_FILE_BYTES)
        except Unreadable as error:
            raise _error_of(self.path, error, f"{name}: ") from None
        if hashlib.sha256(content).hexdigest() != checksum:
            raise DamagedCheckpoint(self.path, f"{name} has a wrong checksum")
        return content


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    root = _validate.path("checkpoint_path", "a directory", directory)
    return root / f"step-{_validate.integer('checkpoint_path', 'a step', step, 0, _LAST_STEP):08d}"


def save_checkpoint(
    directory: str | Path,
    state: TrainingState,
    config: Mapping[str, Any],
    keep_last: int = 2,
    on_progress: Progress | None = None,
) -> Path:
    """Write `step-N` into `directory`, and remove all checkpoints except the newest `keep_last`.

    Files of several devices are hashed and written at the same time, in threads. If a complete
    `step-N` with the same content exists, it is kept as it is, so that it never disappears.

    Args:
        config: everything that must be equal when training resumes, as JSON values.
        on_progress: called with the number of bytes done and of all bytes, from other threads, one
            call at a time. Each byte counts twice, for its checksum and for writing. If it raises,
            no checkpoint is left behind.

    Returns:
        The new checkpoint's path.

    Raises:
        CheckpointError: the step count among the state's tensors differs from `state.step`, or a
            name, shape or configuration could not be read back. Older checkpoints are kept.
        ResourceError: the checkpoint cannot be written. Older checkpoints are kept.
    """
    root = _validate.path("save_checkpoint", "a directory", directory)
    _validate.instance(
        "save_checkpoint", "a state", state, TrainingState, "pass TrainingState(step, tensors)"
    )
    step = _validate.integer("save_checkpoint", "a step", state.step, 0, _LAST_STEP)
    keep_last = _validate.integer("save_checkpoint", "keep_last", keep_last, 1, _LAST_STEP)
    _validate.function("save_checkpoint", "on_progress", on_progress)
    axis_sizes = _validate.mapping("save_checkpoint", "a mesh", state.mesh, "numbers of devices by axis")
    mesh = {
        axis: _validate.integer("save_checkpoint", f"axis {axis!r}", size, 1, MAX_DEVICES)
        for axis, size in axis_sizes.items()
    }
    num_devices = _validate.integer("save_checkpoint", "devices", prod(mesh.values()), 1, MAX_DEVICES)
    tensors = make_parts(state.tensors, num_devices)
    model = None if state.model is None else _record_of(state.model)
    work = _Work(2 * sum(tensor.nbytes for tensor in tensors.values()), on_progress)
    settings = _validate.json("save_checkpoint", "a configuration", config)
    records = describe(tensors, num_devices, work.add)
    meta = Manifest.of(step, settings, mesh, num_devices, records, model, state.changes, state.evaluation)
    _require_readable(meta)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    path = checkpoint_path(root, step)
    problem = _wrong_step(meta, path, tensors)
    if problem is not None:
        raise CheckpointError(
            f"[checkpoint.save_checkpoint] a state's step count must equal the step it is saved as; got {problem}; "
            "save it as the step that it counts"
        )

    def write(temporary: Path) -> None:
        write_device_files(temporary, tensors, num_devices, work.add)
        for name, content in ({} if state.model is None else state.model.files).items():
            (temporary / _MODEL / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / _MODEL / name).write_bytes(content)
        (temporary / MANIFEST).write_text(meta.content(), encoding="utf-8")

    if not _holds(path, meta):
        replace_directory(path, write)
    _remove_older(root, path, keep_last - 1)
    return path


def _record_of(model: FinishedModel) -> ModelRecord:
    """The manifest's record of a finished model's files."""
    call, advice = "save_checkpoint", "pass FinishedModel(files, dtypes)"
    _validate.instance(call, "a model", model, FinishedModel, advice)
    files = _validate.mapping(call, "files of a model", model.files, "bytes")
    contents = {
        name: _validate.instance(call, "a file", content, bytes, advice) for name, content in files.items()
    }
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    try:
        return ModelRecord(files=checksums, dtypes=dict(model.dtypes))
    except ValidationError as error:
        _validate.invalid(call, "a finished model must be readable again", first_problem(error), advice)


def _require_readable(meta: Manifest) -> None:
    """Parse the manifest that will be written, as its readers will. Otherwise older checkpoints
    could be removed for an unreadable one.
    """
    try:
        parse_manifest(meta.content().encode("utf-8"))
    except Unreadable as error:
        _validate.invalid(
            "save_checkpoint",
            "names, shapes and configuration must be readable again",
            str(error),
            "correct them; older checkpoints are kept",
        )


class _Work:
    """The progress of a checkpoint, counted by several threads.

    Args:
        total: bytes to process.
        show: called with the bytes done and `total`, by one thread at a time.
    """

    def __init__(self, total: int, show: Progress | None) -> None:
        self._total, self._show, self._done = total, show, 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count more bytes as done."""
        with self._lock:
            self._done += num_bytes
            if self._show is not None:
                self._show(self._done, self._total)


def _remove_older(root: Path, newest: Path, num_kept: int) -> None:
    """Remove checkpoints older than `newest`, but keep the newest complete ones of them.
    Checkpoints newer than `newest` are not touched.
    """
    for old in reversed(_steps(root)[: _steps(root).index(newest)]):
        try:
            is_kept = num_kept > 0 and _is_listed(old)
        except ResourceError:  # it may be complete, so it stays
            continue
        if is_kept:
            num_kept -= 1
        else:
            remove_directory(old)


def has_checkpoints(directory: str | Path) -> bool:
    """Whether there are checkpoints, complete or not. Raises the errors of `checkpoint_paths`."""
    return bool(_steps(_validate.path("has_checkpoints", "a directory", directory)))


def checkpoint_paths(directory: str | Path) -> list[Path]:
    """All checkpoints in a directory, complete or not, oldest first. Empty if the directory does
    not exist.

    Raises:
        ResourceError: the directory cannot be listed.
    """
    return _steps(_validate.path("checkpoint_paths", "a directory", directory))


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest checkpoint whose metadata, names and sizes are valid, or None. Its content is
    checked when it is loaded. Raises the errors of `checkpoint_paths`, and ResourceError
    as `open_checkpoint` does.
    """
    root = _validate.path("latest_checkpoint", "a directory", directory)
    return next((path for path in reversed(_steps(root)) if _is_listed(path)), None)


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """Open a checkpoint of any configuration. Everything is checked except the tensors' bytes,
    which `OpenCheckpoint.verify` checks.

    Raises:
        DamagedCheckpoint: files are missing, truncated or changed. The message says what is wrong.
        ResourceError: this process may not read a file, or cannot open more files. The checkpoint
            may be valid.
    """
    path = _validate.path("open_checkpoint", "a checkpoint", path)
    try:
        meta = read_manifest(path)
    except Unreadable as error:
        raise _error_of(path, error, f"{MANIFEST}: ") from None
    try:
        files = open_device_files(path, meta)
    except Unreadable as error:
        raise _error_of(path, error) from None
    tensors = assemble(files, meta)
    problem = _wrong_step(meta, path, tensors)
    if problem is not None:
        raise DamagedCheckpoint(path, problem)
    return OpenCheckpoint(
        path,
        meta.step,
        meta.config,
        meta.mesh,
        tensors,
        files,
        meta.model,
        meta.tokenizer,
        tuple(meta.changes),
        meta.evaluation,
    )


def load_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    on_progress: Progress | None = None,
    may_change: Collection[str] = (),
) -> TrainingState:
    """Read a checkpoint after checking every byte of it, and that it belongs to this configuration.

    Args:
        config: configuration of the run that resumes.
        on_progress: called with the number of bytes checked and of all bytes.
        may_change: names `section.key` of settings that may differ from the checkpoint's. Settings
            that differ are appended to the state's `changes`.

    Raises:
        DamagedCheckpoint: files are missing, truncated or changed. The message says what is wrong.
        OtherConfiguration: the checkpoint belongs to another configuration. The message names the
            differences.
        ResourceError: as for `open_checkpoint`.
    """
    path = _validate.path("load_checkpoint", "a checkpoint", path)
    _validate.json("load_checkpoint", "a configuration", config)
    _validate.function("load_checkpoint", "on_progress", on_progress)
    opened = open_checkpoint(path)
    changes = config_changes(opened, config, may_change)
    opened.verify(on_progress)
    return TrainingState(
        opened.step,
        opened.tensors,
        mesh=opened.mesh,
        changes=(*opened.changes, *changes),
        evaluation=opened.evaluation,
    )


def load_latest(
    directory: str | Path,
    config: Mapping[str, Any],
    report: Callable[[str], None],
    on_progress: Progress | None = None,
    may_change: Collection[str] = (),
) -> tuple[Path, TrainingState]:
    """Load the newest valid checkpoint.

    Args:
        report: called with a message for every newer checkpoint that is damaged, and for the one
            that is used instead.
        on_progress: as for `load_checkpoint`.
        may_change: as for `load_checkpoint`.

    Returns:
        The checkpoint's path and content.

    Raises:
        CheckpointError: no checkpoint is valid, or the newest valid one belongs to another
            configuration.
        ResourceError: as for `open_checkpoint`. A checkpoint that may be valid is not skipped.
    """
    damaged: list[str] = []
    if not callable(report):
        _validate.invalid("load_latest", "report must be a function", shown(report), "pass one of a text")
    _validate.function("load_latest", "on_progress", on_progress)
    for path in reversed(_steps(_validate.path("load_latest", "a directory", directory))):
        try:
            state = load_checkpoint(path, config, on_progress, may_change)
        except DamagedCheckpoint as error:
            damaged.append(f"{path.name} is damaged ({error.reason})")
            continue
        for text in damaged:
            report(f"checkpoint {text}; resuming from {path.name} instead")
        return path, state
    raise CheckpointError(
        f"[checkpoint.load_latest] resuming needs a complete checkpoint; got {', '.join(damaged) or 'none'} in "
        f"{str(directory)!r}; train in another directory"
    )


def _error_of(path: Path, error: Unreadable, where: str = "") -> DamagedCheckpoint | ResourceError:
    """The error to raise for a rejected file of a checkpoint. If this process may not read the
    file, it is a ResourceError, because the checkpoint may be valid.
    """
    if isinstance(error, Forbidden):
        return ResourceError(
            "[checkpoint.open] a checkpoint must be readable to be checked; got "
            f"{str(path)!r}: {where}{error}; check its permissions"
        )
    return DamagedCheckpoint(path, f"{where}{error}")


def _wrong_step(meta: Manifest, path: Path, tensors: Mapping[str, FileTensor | PartedTensor]) -> str | None:
    """How directory, metadata and state disagree about the step; None if they agree."""
    step_tensor = tensors.get(_STEP_TENSOR)
    if step_tensor is not None and step_tensor.shape != (
        1,
    ):  # a damaged file may claim any size, so it is not read
        return f"{path.name}, whose state counts steps in a tensor of {shown(list(step_tensor.shape))}"
    counted = [meta.step] if step_tensor is None else np.asarray(step_tensor).reshape(-1).tolist()
    if path.name == f"step-{meta.step:08d}" and counted == [meta.step]:
        return None
    return f"{path.name}, whose manifest has step {shown(meta.step)} and whose state counts {shown(counted)}"


def _is_listed(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except DamagedCheckpoint:
        return False
    return True


def _holds(path: Path, meta: Manifest) -> bool:
    """Whether a complete checkpoint with this content exists at this path."""
    try:
        if read_manifest(path).digest != meta.digest:
            return False
        open_checkpoint(path).verify()
    except (CheckpointError, ResourceError, Unreadable):
        return False
    return True


RENAMED_SETTINGS: Mapping[str, str] = {"train.leaves": "train.batch_splits"}
"""Names of settings in configuration files and checkpoints of earlier versions, and what they are called now."""


def config_changes(
    opened: OpenCheckpoint, config: Mapping[str, Any], may_change: Collection[str] = ()
) -> list[ConfigChange]:
    """The settings in which a configuration differs from a checkpoint's configuration. None stands
    for a missing value.

    Raises:
        OtherConfiguration: a setting differs that is not in `may_change`.
    """
    before = {RENAMED_SETTINGS.get(key, key): value for key, value in flat_settings(opened.config)}
    after = dict(flat_settings(config))
    changes = [
        ConfigChange(step=opened.step, key=key, old=before.get(key), new=after.get(key))
        for key in {**after, **before}
        if key not in before or key not in after or before[key] != after[key]
    ]
    if any(change.key not in may_change for change in changes):
        raise OtherConfiguration(opened.path, changes)
    return changes


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted names. Nested mappings are flattened."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _steps(root: Path) -> list[Path]:
    """All `step-N` directories, oldest first.

    Raises:
        ResourceError: the directory cannot be listed, so it is unknown whether there are
            checkpoints.
    """
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise ResourceError(
            f"[checkpoint.checkpoint_paths] a directory must be listed to find its checkpoints; got {str(root)!r}: "
            f"{error.strerror}; check its permissions and the limit of open files (ulimit -n)"
        ) from None
    numbered = [(int(match[1]), root / name) for name in names if (match := STEP_NAME.fullmatch(name))]
    return [path for _, path in sorted(numbered)]
