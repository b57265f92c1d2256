"""Reads and writes PEFT directories: adapter_config.json and adapter_model.safetensors.

The tensors of a directory say which modules have adapters and with which rank; the settings say how they are
scaled. Directories may come from anywhere: settings that this version does not compute (DoRA, biases,
embeddings, tokens of their own) are rejected by name, and so are fields with an unknown effect.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tilewise.checkpoint.adapters.lora_config import LoraConfig
from tilewise.checkpoint.files import replace_directory
from tilewise.checkpoint.shards import save_tensors
from tilewise.checkpoint.stored import Stored
from tilewise.checkpoint.tensors import Tensor
from tilewise.checkpoint.weights import open_weights
from tilewise.core import CheckpointError, ConfigError
from tilewise.core.validation import Validator, shown
from tilewise.files.reading import Unreadable, read_json
from tilewise.files.writing import writing

__all__ = [
    "ADAPTER_CONFIG",
    "PREFIX",
    "OpenAdapter",
    "adapter_files",
    "is_adapter",
    "open_adapter",
    "save_adapter",
]

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""Begins every name of a tensor in PEFT's files."""
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_OF_ADAPTER = re.compile(re.escape(PREFIX) + r"(.+)\.lora_[AB]\.weight")
_IGNORED = frozenset(  # of PEFT: they describe the file, or matter only next to a field that is rejected
    (
        "auto_mapping",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    )
)
_validate = Validator("lora", CheckpointError)


class _Settings(BaseModel):
    """The fields of adapter_config.json that are used."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    peft_type: str
    r: int = 8
    lora_alpha: int | float = 8
    lora_dropout: float = 0.0
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, int | float] | None = None
    use_rslora: bool = False
    modules_to_save: list[str] | None = None
    bias: str = "none"
    base_model_name_or_path: str | None = None
    target_modules: Any = None
    exclude_modules: Any = None
    layers_to_transform: Any = None


@dataclass(frozen=True)
class OpenAdapter:
    """An adapter in a directory. Its tensors are read on use.

    Attributes:
        path: the directory.
        config: its settings; `target_modules` are the modules for which it has tensors.
        tensors: by name, as PEFT names them.
        base: the model that it belongs to, as the file names it; None if it names none.
        targets: the ends of names of modules that have adapters according to the file; empty if it lists none, or
            only some layers have them.
    """

    path: Path
    config: LoraConfig
    tensors: Mapping[str, Stored]
    base: str | None
    targets: tuple[str, ...] = ()


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory has an adapter_config.json."""
    return os.path.lexists(Path(directory) / ADAPTER_CONFIG)


def open_adapter(directory: str | Path) -> OpenAdapter:
    """Open a directory that PEFT or `save_adapter` has written.

    Raises:
        CheckpointError: it is no such directory, a file is damaged, or it has no adapters of linear modules.
        ConfigError: a setting is invalid, or is not supported (DoRA, biases, adapters of embeddings).
    """
    path = _validate.path("open_adapter", "an adapter", directory)
    where = f"{str(path / ADAPTER_CONFIG)!r}"
    try:
        settings = read_json(path / ADAPTER_CONFIG, _Settings)
    except Unreadable as error:
        rule = f"an adapter must be a directory with an {ADAPTER_CONFIG}, as PEFT writes it"
        _validate.invalid("open_adapter", rule, f"{where}: {error}", "check the path")
    if settings.peft_type != "LORA":
        _unsupported(f"peft_type {shown(settings.peft_type)}", where)
    if settings.bias != "none":
        _unsupported(f"bias {shown(settings.bias)}", where)
    for name, value in (settings.model_extra or {}).items():
        if name not in _IGNORED and value not in (None, False, {}, []):
            _unsupported(f"{shown(name)}: {shown(value)}", where)
    names = [name for name in _WEIGHTS if os.path.lexists(path / name)]
    if not names:
        rule, advice = f"an adapter must have {_WEIGHTS[0]}", "check that it is complete"
        _validate.invalid("open_adapter", rule, f"none in {str(path)!r}", advice)
    tensors = open_weights(path / names[0])
    modules = dict.fromkeys(match[1] for name in tensors if (match := _OF_ADAPTER.fullmatch(name)))
    odd = next((n for n in tensors if ".lora_" in n and not _OF_ADAPTER.fullmatch(n)), None)
    if odd is not None:
        _unsupported(f"the tensor {shown(odd)}", f"{str(path / names[0])!r}")
    if not modules:
        rule = f"an adapter must have tensors {PREFIX}MODULE.lora_A.weight"
        _validate.invalid("open_adapter", rule, f"none in {str(path / names[0])!r}", "check the file")
    config = LoraConfig(
        r=settings.r,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
        target_modules=tuple(modules),
        rank_pattern=settings.rank_pattern or {},
        alpha_pattern=settings.alpha_pattern or {},
        use_rslora=settings.use_rslora,
        modules_to_save=tuple(settings.modules_to_save or ()),
    )
    listed = settings.target_modules
    has_exceptions = settings.exclude_modules or settings.layers_to_transform is not None
    targets = tuple(map(str, listed)) if isinstance(listed, list) and not has_exceptions else ()
    return OpenAdapter(path, config, tensors, settings.base_model_name_or_path, targets)


def _unsupported(what: str, where: str) -> None:
    raise ConfigError(
        "[lora.open_adapter] an adapter must be plain LoRA of linear modules, without DoRA, biases or tokens of its "
        f"own; got {what} in {where}; merge it with PEFT, or train one without it"
    )


def adapter_files(
    config: LoraConfig, modules: Iterable[str], *, base: str | None, is_transposed: bool, task: str
) -> dict[str, bytes]:
    """The content of an adapter's files except its tensors, by name.

    Args:
        config: its settings.
        modules: names, or last parts of names, of the modules that have adapters.
        base: path or name of the model that the adapter belongs to.
        is_transposed: whether the model's files store weights as `[in, out]`, as GPT-2's do.
        task: PEFT's name of the task, such as `CAUSAL_LM`.
    """
    content: dict[str, Any] = {
        "alpha_pattern": {k: _plain(v) for k, v in config.alpha_pattern.items()},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": _listed(config.exclude_modules),
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
        "init_lora_weights": config.init,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _plain(config.alpha),
        "lora_dropout": config.dropout,
        "modules_to_save": [*config.modules_to_save] or None,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": dict(config.rank_pattern),
        "revision": None,
        "target_modules": [*modules],
        "task_type": task,
        "use_dora": False,
        "use_rslora": config.use_rslora,
    }
    return {ADAPTER_CONFIG: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()}


def _listed(modules: str | tuple[str, ...] | None) -> str | list[str] | None:
    return [*modules] if isinstance(modules, tuple) else modules


def _plain(value: float) -> int | float:
    """A number as PEFT writes it: whole numbers as integers."""
    return int(value) if value == int(value) else value


def save_adapter(
    directory: str | Path, files: Mapping[str, bytes], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write an adapter that PEFT can open, completely or not at all. An existing directory is replaced.

    Args:
        directory: where.
        files: from `adapter_files`, and further files, by name.
        tensors: by PEFT's names.

    Raises:
        ResourceError: it cannot be written. An existing directory is kept.
    """
    path = _validate.path("save_adapter", "a directory", directory)

    def write(temporary: Path) -> None:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        save_tensors(temporary / _WEIGHTS[0], dict(tensors), {"format": "pt"})

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_directory(path, write)
