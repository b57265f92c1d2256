"""Finds models by their name on the Hugging Face hub. They are in the hub's cache, or are
downloaded into it.

This module chooses which files of a repository to download: configuration, tokenizer and the
safetensors files of one copy of the weights, or one model in GGUF files; but never code or pickled
weights. `owner/name:Q4_K_M` names the GGUF file of a quantisation. `huggingface_hub`
downloads, shows progress, and handles the cache, tokens and offline mode (`HF_HUB_OFFLINE`,
`HF_HOME`, `HF_TOKEN`). Invalid names, and errors of the hub, are reported before any work.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

from tilewise.checkpoint.companions import GENERATION, MODULES, TEMPLATES, TOKENIZER
from tilewise.checkpoint.gguf import first_files, gguf_model
from tilewise.checkpoint.quantised_files import OLDER_SETTINGS
from tilewise.checkpoint.weights import AUTOGPTQ, INDEX, SINGLE, files_of_index
from tilewise.core import ConfigError, Validator
from tilewise.core.validation import cut, shown
from tilewise.files.reading import Unreadable, refusals_of

__all__ = ["find_model"]

_validate = Validator("checkpoint")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([A-Za-z0-9][\w.-]{0,95}))?")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,254}")  # it becomes a part of a path in the cache
# The quantisation in a file's name: the last part that begins like the name of a type.
_TAG = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[0-9]|TQ[0-9]|F16|F32|BF16|MXFP4)[A-Z0-9_]*)(?:-[0-9]{5}-of-[0-9]{5})?\.gguf$",
    re.IGNORECASE,
)
_SUFFIX = ".gguf"
_ENDINGS = ("[.]gguf", "-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9][.]gguf")
_MAX_REASON = 300
_MOST_NAMED = 16
_SMALL = (
    "config.json",
    GENERATION,
    *TOKENIZER,
    *TEMPLATES,
    *MODULES,
    *OLDER_SETTINGS,
    INDEX,
)


def find_model(name: str | Path, revision: str | None = None) -> Path:
    """The place of a model: `name` itself if it is a directory or a file, otherwise that of the hub's
    repository `owner/name`, or of a GGUF file in it.

    Args:
        name: a directory, a GGUF file, or a repository on the hub. What exists takes precedence.
            `owner/name:Q4_K_M` is the repository's GGUF file (or the files) of this quantisation,
            `owner/name:model.gguf` the file of this name.
        revision: a branch, tag or commit of the repository; None for its main branch.

    Raises:
        ConfigError: `name` is neither a directory nor a repository. Or a revision is given for a
            directory, the hub cannot be reached and its cache has no copy, or the repository has no
            safetensors files and not exactly one model in GGUF files.
        CheckpointError: a GGUF file is damaged or not supported.
    """
    path = _validate.path("find_model", "a model", name)
    text = os.fsdecode(name)  # unchanged: ./owner/name is a path, not a repository
    if revision is not None and (not isinstance(revision, str) or not _REVISION.fullmatch(revision)):
        _validate.invalid(
            "find_model", "a revision is a branch, tag or commit", shown(revision), "correct it"
        )
    match = _NAME.fullmatch(text)
    if os.path.lexists(path) or match is None:
        if revision is not None:
            _validate.invalid(
                "find_model", "a revision belongs to a model on the hub", f"{text!r}", "give owner/name"
            )
        gguf_model(path)  # raises if it is damaged, or one of several
        return path
    return _download(match[1], revision) if match[2] is None else _download_gguf(match[1], revision, match[2])


def _download(repository: str, revision: str | None) -> Path:
    """Download a repository's files. Small files are downloaded first, because they name the files
    with weights.
    """
    directory = _snapshot(repository, revision, list(_SMALL))
    if not (directory / "config.json").exists():
        if tags := _tags(repository, directory):
            return _only_gguf(repository, directory.name, tags)
        raise ConfigError(
            f"[checkpoint.find_model] a repository of a model must have config.json or a GGUF file; got {repository!r} "
            "without them; check its name"
        )
    is_single = not (directory / INDEX).exists()
    weights = [SINGLE, AUTOGPTQ] if is_single else sorted(files_of_index(directory))
    directory = _snapshot(repository, directory.name, weights)
    if is_single:
        weights = [] if any(directory.glob(AUTOGPTQ)) else [SINGLE]
    missing = next((file for file in weights if not (directory / file).exists()), None)
    if missing is not None:
        if tags := _tags(repository, directory):
            return _only_gguf(repository, directory.name, tags)
        raise ConfigError(
            f"[checkpoint.find_model] a repository must hold its weights as safetensors; got {repository!r} without "
            f"{missing!r}; pickled weights are not read because they can run any code: choose another revision or "
            "repository, or convert them"
        )
    return directory


def _only_gguf(repository: str, revision: str, tags: list[str]) -> Path:
    """Download the GGUF file of a repository without other weights, if it has one model."""
    if len(tags) > 1:
        raise ConfigError(
            "[checkpoint.find_model] a repository of several GGUF files needs the name of one; got "
            f"{repository!r} with {', '.join(tags[:_MOST_NAMED])}; give {repository}:{tags[0]}, for example"
        )
    return _download_gguf(repository, revision, tags[0])


def _download_gguf(repository: str, revision: str | None, tag: str) -> Path:
    """Download the GGUF file of a quantisation, or all of its parts, and return its (first) file.

    Args:
        repository: its name.
        revision: of the repository.
        tag: what precedes `.gguf` in the name, after a separator: `Q4_K_M`, in upper or lower case; or
            the whole name.
    """
    any_case = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in tag)
    patterns = [f"{before}{any_case}{after}" for before in ("", "*[-._/]") for after in _ENDINGS]
    if tag.lower().endswith(_SUFFIX):
        patterns = [any_case, f"*/{any_case}"]
    directory = _snapshot(repository, revision, patterns, ["*mmproj*", "*imatrix*"])
    paths = sorted(path for path in directory.rglob("*") if path.name.lower().endswith(_SUFFIX))
    names = [path.relative_to(directory).as_posix() for path in paths]
    files = first_files([name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)])
    if len(files) != 1:
        there = files or _tags(repository, directory)
        raise ConfigError(
            f"[checkpoint.find_model] a quantisation must name one model in GGUF files; got {tag!r} for "
            f"{repository!r}, which has {', '.join(there[:_MOST_NAMED]) or 'no GGUF files'}; name one of them"
        )
    return directory / files[0]


def _tags(repository: str, directory: Path) -> list[str]:
    """What names the models in GGUF files of a repository: their quantisations, or names of files; of
    those in the cache, if the hub cannot be reached.

    Args:
        repository: its name.
        directory: of the downloaded files; its name is the commit.
    """
    from huggingface_hub import HfApi

    try:
        with refusals_of("huggingface_hub"):
            names = HfApi().list_repo_files(repository, revision=directory.name)
    except Unreadable:
        names = [path.relative_to(directory).as_posix() for path in directory.rglob("*")]
    models = [
        name for name in first_files(sorted(names)) if _NAME.fullmatch(f"a/b:{name.rpartition('/')[2]}")
    ]
    tags = [_TAG.search(name) for name in models]
    short = [tag[1] if tag else name.rpartition("/")[2] for tag, name in zip(tags, models)]
    whole = [name.rpartition("/")[2] for name in models]
    return [tag if short.count(tag) == 1 else name for tag, name in zip(short, whole)]


def _snapshot(
    repository: str, revision: str | None, files: list[str], ignored: list[str] | None = None
) -> Path:
    """Download those of `files` that a repository has, and return their directory in the hub's
    cache.
    """
    from huggingface_hub import snapshot_download

    try:
        with refusals_of("huggingface_hub"):
            directory = snapshot_download(
                repository, revision=revision, allow_patterns=files, ignore_patterns=ignored
            )
    except Unreadable as error:
        raise ConfigError(
            "[checkpoint.find_model] a model is a directory or a repository on the Hugging Face hub; got "
            f"{repository!r}, not a directory; {cut(str(error), _MAX_REASON)}; check the name, the network and "
            "HF_HUB_OFFLINE, or give a directory"
        ) from None
    return Path(str(directory))
