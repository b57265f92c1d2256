"""Training checkpoints: `step-N` directories and a file `latest` that names the newest.

A checkpoint holds the state of a model (parameters, optimizer), with sizes and the configuration that decides
its values. It is written under a hidden name and renamed, `latest` is replaced after that, so whatever moment
a process is killed at, an older or a newer checkpoint stands whole. Loading checks before it trusts, and names
the setting that differs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.files import remove_leftovers, replace_directory, replace_text
from tilewise.checkpoint.weights import open_weights
from tilewise.core import CheckpointError

__all__ = ["TrainingState", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_LATEST = "latest"
_STATE = "state.safetensors"
_META = "checkpoint.json"
_STEP = re.compile(r"step-(\d+)$")


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        tensors: the model's `state_dict()`; read lazily after loading.
    """

    step: int
    tensors: Mapping[str, NDArray[Any]]


def save_checkpoint(
    directory: str | Path, state: TrainingState, config: Mapping[str, Any], keep_last: int = 2
) -> Path:
    """Write `step-N` into `directory`, make it the latest, remove all but the newest `keep_last`.

    A whole `step-N` of the same configuration is kept as it is: training is exact, so its content is the same.

    Args:
        config: everything that must be equal when training goes on, as JSON can hold it.

    Returns:
        The new checkpoint's path.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    path = root / f"step-{state.step:08d}"

    def write(temporary: Path) -> None:
        from safetensors.numpy import save_file

        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in state.tensors.items()}
        save_file(tensors, str(temporary / _STATE))
        meta = {
            "step": state.step,
            "config": config,
            "state_bytes": (temporary / _STATE).stat().st_size,
            "num_tensors": len(tensors),
        }
        (temporary / _META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")

    if not (_damage(path) is None and not _differences(_meta(path)["config"], config)):
        replace_directory(path, write)
    replace_text(root / _LATEST, path.name)
    for old in _steps(root)[: -max(1, keep_last)]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest whole checkpoint: the one that `latest` names, or a newer or older one if that is
    damaged."""
    root = Path(directory)
    candidates = _steps(root)[::-1]
    latest = root / _LATEST
    if latest.is_file():
        named = root / latest.read_text(encoding="utf-8").strip()
        candidates.sort(key=lambda path: path == named, reverse=True)
    return next((path for path in candidates if _damage(path) is None), None)


def load_checkpoint(path: str | Path, config: Mapping[str, Any]) -> TrainingState:
    """Read a checkpoint after checking that it is whole and belongs to this configuration.

    Raises:
        CheckpointError: missing or truncated files, or another configuration; names what differs.
    """
    path = Path(path)
    damage = _damage(path)
    if damage is not None:
        raise CheckpointError(
            f"[checkpoint.load_checkpoint] a checkpoint must be whole; got {path}: {damage}; "
            "resume from an older one"
        )
    meta = _meta(path)
    differences = _differences(meta["config"], config)
    if differences:
        raise CheckpointError(
            "[checkpoint.load_checkpoint] model, data and optimizer must be those the checkpoint was made with; "
            f"got {', '.join(differences)} in {path}; restore the configuration or start anew"
        )
    return TrainingState(int(meta["step"]), open_weights(path / _STATE))


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
    found = [(int(match[1]), path) for path in root.glob("step-*") if (match := _STEP.match(path.name))]
    return [path for _, path in sorted(found)]


def _meta(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / _META).read_text(encoding="utf-8")))


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None when it is whole."""
    try:
        meta = _meta(path)
        size = (path / _STATE).stat().st_size
        if size != meta["state_bytes"]:
            return f"{_STATE} has {size} bytes instead of {meta['state_bytes']}"
        if not isinstance(meta["config"], dict):
            return f"{_META} holds no configuration"
        found = len(open_weights(path / _STATE))
        if found != meta["num_tensors"]:
            return f"{_STATE} holds {found} tensors instead of {meta['num_tensors']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    return None
