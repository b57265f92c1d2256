"""Training checkpoints: `step-N` directories and a file `latest` that names the newest.

A checkpoint holds the state of a model (parameters, optimizer) and what else training needs to go on (a
dictionary), with sizes and a digest of the configuration. It is written under a hidden name and renamed,
`latest` is replaced after that, so whatever moment a process is killed at, an older or a newer checkpoint
stands whole. Loading checks before it trusts.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.files import remove_leftovers, replace_directory, replace_text
from tilewise.checkpoint.weights import open_weights
from tilewise.core import CheckpointError

__all__ = ["TrainingState", "config_digest", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

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
        progress: whatever else training needs to go on, as JSON.
    """

    step: int
    tensors: Mapping[str, NDArray[Any]]
    progress: Mapping[str, Any]


def config_digest(config: Mapping[str, Any]) -> str:
    """A short name for a configuration: equal for equal content, in any order of keys."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def save_checkpoint(directory: str | Path, state: TrainingState, digest: str, keep_last: int = 2) -> Path:
    """Write `step-N` into `directory`, make it the latest, remove all but the newest `keep_last`.

    A whole `step-N` of the same digest is kept as it is: training is exact, so its content is the same.

    Args:
        digest: `config_digest` of everything that must be equal when training goes on.

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
            "digest": digest,
            "state_bytes": (temporary / _STATE).stat().st_size,
            "num_tensors": len(tensors),
            "progress": dict(state.progress),
        }
        (temporary / _META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")

    if not (_damage(path) is None and _meta(path)["digest"] == digest):
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


def load_checkpoint(path: str | Path, digest: str) -> TrainingState:
    """Read a checkpoint after checking that it is whole and belongs to this configuration.

    Raises:
        CheckpointError: missing or truncated files, or another configuration.
    """
    path = Path(path)
    damage = _damage(path)
    if damage is not None:
        raise CheckpointError(
            f"[checkpoint.load_checkpoint] a checkpoint must be whole; got {path}: {damage}; "
            "resume from an older one"
        )
    meta = _meta(path)
    if meta["digest"] != digest:
        raise CheckpointError(
            "[checkpoint.load_checkpoint] model, data and optimizer must be those the checkpoint "
            "was made with; got "
            f"digest {digest[:8]} for one of {str(meta['digest'])[:8]} in {path}; restore the "
            "configuration or start anew"
        )
    return TrainingState(int(meta["step"]), open_weights(path / _STATE), meta["progress"])


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
        found = len(open_weights(path / _STATE))
        if found != meta["num_tensors"]:
            return f"{_STATE} holds {found} tensors instead of {meta['num_tensors']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    return None
