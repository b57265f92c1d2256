"""`[lora]` of a training configuration: the adapters that are trained instead of the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import Field, field_validator, model_validator

from tilewise.checkpoint.adapters import LoraConfig, open_adapter
from tilewise.core import ConfigError
from tilewise.train.section import FilePath, Section, WrongValue

__all__ = ["LoraSection"]

_UNSUPPORTED = (
    "use_dora",
    "bias",
    "lora_bias",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "target_parameters",
    "trainable_token_indices",
    "loftq_config",
    "eva_config",
    "corda_config",
    "megatron_config",
)


class LoraSection(Section):
    """`[lora]`: adapters as PEFT's `LoraConfig` describes them. The section exists only in runs that train
    adapters; without keys it has PEFT's defaults.

    Attributes:
        path: an adapter to continue with; it determines all other keys but `dropout`.
        r: the rank of the adapters. `LoraConfig` describes this and the other keys.
    """

    path: FilePath | None = None
    r: int = Field(default=8, ge=1)
    alpha: float = Field(default=8.0, ge=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    init: bool | str = True

    @model_validator(mode="before")
    @classmethod
    def _are_supported(cls, values: object) -> object:
        """Rejects settings of PEFT that Tilewise does not have, unless they are switched off."""
        if not isinstance(values, Mapping):
            return values
        used = [name for name in _UNSUPPORTED if values.get(name) not in (None, False, "none")]
        if used:
            raise WrongValue(f"lora.{used[0]} of PEFT is not supported", "remove it")
        return {name: value for name, value in values.items() if name not in _UNSUPPORTED}

    @field_validator("target_modules", "exclude_modules", "modules_to_save", mode="before")
    @classmethod
    def _tuples(cls, value: object) -> object:
        """Converts TOML's lists to tuples."""
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _is_valid(self) -> LoraSection:
        if self.path is not None and self.model_fields_set - {"path", "dropout"}:
            other = min(self.model_fields_set - {"path", "dropout"})
            raise ValueError(f"lora.path determines the other keys, got {other} too")
        if self.path is None:
            try:
                self.lora_config()
            except ConfigError as error:
                raise ValueError(f"lora.{str(error).partition('] ')[2]}") from None
        return self

    def lora_config(self) -> LoraConfig:
        """The adapters' settings. Those of `path` are read.

        Raises:
            ConfigError, CheckpointError: `path` is not an adapter, or not a supported one.
        """
        if self.path is not None:
            return replace(open_adapter(self.path).config, dropout=self.dropout)
        return LoraConfig(**self.model_dump(exclude={"path"}))

    def settings(self) -> dict[str, Any]:
        """The settings that determine the result, as JSON values, by name. Raises the errors of
        `lora_config`.
        """
        values = {f.name: getattr(self.lora_config(), f.name) for f in fields(LoraConfig)}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        return {k: [*v] if isinstance(v, tuple) else v for k, v in plain.items()}
