"""Pooling: computes a text's vector from those of its tokens (the mean, or the first one),
optionally scaled to length one; and the maximum number of tokens.

Sentence models describe this in files of sentence-transformers next to the model: modules.json
lists the modules after the encoder, and each has a folder with its settings. Modules that are not
supported are an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, RootModel

from tilewise.checkpoint import Companions, open_companions
from tilewise.core import ConfigError, Validator
from tilewise.core.dtypes import is_float
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, parse_json

__all__ = ["POOLINGS", "Pooling", "load_max_length", "load_pooling"]

POOLINGS = ("mean", "cls")
"""Modes of `Pooling`."""
_validate = Validator("encode")
_KINDS = ("Transformer", "Pooling", "Normalize")
_MAX_BYTES = 1 << 20
_MAX_NAME_BYTES = 255
_PREFIX = "sentence_transformers.models."


class _Module(BaseModel):
    """One line of modules.json."""

    model_config = ConfigDict(strict=True, extra="ignore")

    path: str
    type: str


class _Modules(RootModel[list[_Module]]):
    """modules.json."""


class _PoolingFile(BaseModel):
    """config.json of a pooling module."""

    model_config = ConfigDict(strict=True, extra="ignore")

    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _SentenceFile(BaseModel):
    """sentence_bert_config.json."""

    model_config = ConfigDict(strict=True, extra="ignore")

    max_seq_length: int | None = Field(default=None, ge=1)
    do_lower_case: bool = False


@dataclass(frozen=True)
class Pooling:
    """How the vectors of tokens become one.

    Attributes:
        mode: `mean` of all tokens, or the first token's (`cls`).
        normalize: whether the result is scaled to length one.

    Raises:
        ConfigError: there is no such mode.
    """

    mode: str = "mean"
    normalize: bool = False

    def __post_init__(self) -> None:
        _validate.choice("pooling", "mode", self.mode, POOLINGS)
        _validate.truth("pooling", "normalize", self.normalize)

    def pool(self, hidden_SD: NDArray[Any]) -> NDArray[np.float32]:
        """The vector `[D]` of a text from those of its tokens `[S, D]`, in fp32.

        Raises:
            ConfigError: there are no tokens, or the vectors are not a matrix of numbers.
        """
        is_matrix = isinstance(hidden_SD, np.ndarray) and hidden_SD.ndim == 2 and is_float(hidden_SD.dtype)
        if not is_matrix or not len(hidden_SD):
            _validate.invalid(
                "pooling",
                "the vectors of a text must be rows of floating-point numbers",
                shown(hidden_SD),
                "pass one row per token",
            )
        rows = hidden_SD.astype(np.float32)
        vector = rows[0] if self.mode == "cls" else rows.mean(0, dtype=np.float32)
        if self.normalize:
            vector = vector / max(float(np.sqrt(np.sum(vector * vector, dtype=np.float64))), 1e-12)
        return np.ascontiguousarray(vector, np.float32)


def load_pooling(model_dir: str | Path) -> Pooling:
    """The pooling of a model directory; by default the mean.

    Raises:
        ConfigError: its files cannot be read, or ask for something unsupported; names the file.
    """
    files, name = open_companions(_validate.path("pooling", "a model directory", model_dir)), "modules.json"
    if not files.has(name):
        return Pooling()
    path = files.called(name)
    modules = _read(files, name, _Modules).root
    kinds = [module.type.removeprefix(_PREFIX) for module in modules]
    for kind, module in zip(kinds, modules):
        if kind not in _KINDS:
            _validate.invalid(
                "pooling",
                f"{path} must list {', '.join(_KINDS)} only",
                shown(module.type),
                "use a model without it",
            )
    if len(kinds) < 2 or kinds != list(_KINDS[: len(kinds)]):  # also rejects a module that appears twice
        _validate.invalid(
            "pooling",
            f"{path} must list Transformer, Pooling and perhaps Normalize, in this order",
            shown(kinds),
            "correct it",
        )
    if modules[0].path not in ("", "."):
        _validate.invalid(
            "pooling",
            f"{path} must have its Transformer in the directory itself",
            shown(modules[0].path),
            "move its files there",
        )
    return Pooling(_mode_of(files, modules[1].path), "Normalize" in kinds)


def load_max_length(model_dir: str | Path) -> int | None:
    """The maximum number of tokens according to files of sentence-transformers; None if they do not
    say.

    Raises:
        ConfigError: the file cannot be read, or asks for a change of texts that the tokenizer does
            not make.
    """
    files = open_companions(_validate.path("pooling", "a model directory", model_dir))
    name = "sentence_bert_config.json"
    if not files.has(name):
        return None
    settings: _SentenceFile = _read(files, name, _SentenceFile)
    if settings.do_lower_case:
        _validate.invalid(
            "pooling",
            f"{files.called(name)} must not set do_lower_case, which is a setting of the tokenizer",
            "true",
            "use a model without it",
        )
    return settings.max_seq_length


def _mode_of(files: Companions, folder: str) -> str:
    is_plain = folder not in ("", ".", "..") and folder == os.path.basename(folder) and "\\" not in folder
    if not is_plain or len(os.fsencode(folder)) > _MAX_NAME_BYTES or "\0" in folder:
        _validate.invalid(
            "pooling",
            f"{files.called('modules.json')} must name folders next to it",
            shown(folder),
            "correct it",
        )
    name = f"{folder}/config.json"
    settings = _read(files, name, _PoolingFile)
    chosen = sorted(name for name, is_set in settings.model_dump().items() if is_set)
    mode_of_field = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(chosen) != 1 or chosen[0] not in mode_of_field:
        _validate.invalid(
            "pooling",
            f"{files.called(name)} must choose one of {', '.join(mode_of_field)}",
            ", ".join(chosen) or "none",
            "pass your own pooling",
        )
    return mode_of_field[chosen[0]]


def _read(files: Companions, name: str, model: Any) -> Any:
    try:
        return parse_json(files.read(name, _MAX_BYTES), model)
    except Unreadable as error:
        raise ConfigError(
            f"[encode.pooling] a model's settings must be readable; got {files.called(name)}: {error}; repair the file"
        ) from None
