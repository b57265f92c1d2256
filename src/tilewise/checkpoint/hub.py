"""Finds models by their name on the Hugging Face hub. They are in the hub's cache, or are
downloaded into it.

This module chooses which files of a repository to download: configuration, tokenizer and the
safetensors files of one copy of the weights, but never code or pickled weights. `huggingface_hub`
downloads, shows progress, and handles the cache, tokens and offline mode (`HF_HUB_OFFLINE`,
`HF_HOME`, `HF_TOKEN`). Invalid names, and errors of the hub, are reported before any work.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tilewise.checkpoint.companions import GENERATION, MODULES, TEMPLATES, TOKENIZER
from tilewise.checkpoint.gguf import gguf_model
from tilewise.checkpoint.weights import INDEX, SINGLE, files_of_index
from tilewise.core import ConfigError, Validator
from tilewise.core.validation import cut, shown
from tilewise.files.reading import Unreadable, refusals_of

__all__ = ["find_model"]

_validate = Validator("checkpoint")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,254}")  # it becomes a part of a path in the cache
_MAX_REASON = 300
_SMALL = (
    "config.json",
    GENERATION,
    *TOKENIZER,
    *TEMPLATES,
    *MODULES,
    INDEX,
)


def find_model(name: str | Path, revision: str | None = None) -> Path:
    """The directory of a model: `name` itself if it is a directory, otherwise the hub's repository
    `owner/name`.

    Args:
        name: a directory, or a repository on the hub. An existing directory takes precedence.
        revision: a branch, tag or commit of the repository; None for its main branch.

    Raises:
        ConfigError: `name` is neither a directory nor a repository, or is a GGUF file. Or a
            revision is given for a directory, the hub cannot be reached and its cache has no copy,
            or the repository has no safetensors files.
    """
    path = _validate.path("find_model", "a model", name)
    text = os.fsdecode(name)  # unchanged: ./owner/name is a path, not a repository
    if revision is not None and (not isinstance(revision, str) or not _REVISION.fullmatch(revision)):
        _validate.invalid(
            "find_model", "a revision is a branch, tag or commit", shown(revision), "correct it"
        )
    if os.path.lexists(path) or not _NAME.fullmatch(text):
        if revision is not None:
            _validate.invalid(
                "find_model", "a revision belongs to a model on the hub", f"{text!r}", "give owner/name"
            )
        gguf_model(path)  # raises if it is damaged, or one of several
        return path
    return _download(text, revision)


def _download(repository: str, revision: str | None) -> Path:
    """Download a repository's files. Small files are downloaded first, because they name the files
    with weights.
    """
    directory = _snapshot(repository, revision, list(_SMALL))
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"[checkpoint.find_model] a repository of a model must have config.json; got {repository!r} without it; "
            "check its name (repositories that have only GGUF files are not loaded: give the original model's)"
        )
    weights = sorted(files_of_index(directory)) if (directory / INDEX).exists() else [SINGLE]
    directory = _snapshot(repository, directory.name, weights)
    missing = next((file for file in weights if not (directory / file).exists()), None)
    if missing is not None:
        raise ConfigError(
            f"[checkpoint.find_model] a repository must hold its weights as safetensors; got {repository!r} without "
            f"{missing!r}; pickled weights are not read because they can run any code: choose another revision or "
            "repository, or convert them"
        )
    return directory


def _snapshot(repository: str, revision: str | None, files: list[str]) -> Path:
    """Download those of `files` that a repository has, and return their directory in the hub's
    cache.
    """
    from huggingface_hub import snapshot_download

    try:
        with refusals_of("huggingface_hub"):
            directory = snapshot_download(repository, revision=revision, allow_patterns=files)
    except Unreadable as error:
        raise ConfigError(
            "[checkpoint.find_model] a model is a directory or a repository on the Hugging Face hub; got "
            f"{repository!r}, not a directory; {cut(str(error), _MAX_REASON)}; check the name, the network and "
            "HF_HUB_OFFLINE, or give a directory"
        ) from None
    return Path(str(directory))
