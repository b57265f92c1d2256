"""Configuration of a Llama model: what the graph needs to know, read from and written to Hugging Face's
config.json.

Refuses, with the field's name, everything the graph does not compute (biases, other activations, other RoPE
types, other architectures) and every value that no model has, so that a model is never run as something it is not.
Reads both spellings of RoPE settings (`rope_theta` with `rope_scaling`, and `rope_parameters`). Comes from a file
(`config_file.py` has its types) or a training configuration; goes to model.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.core.border import Border, shown
from tilewise.core.errors import ConfigError
from tilewise.core.reading import Unreadable, first_problem, read_json

if TYPE_CHECKING:
    from tilewise.models.llama.config_file import ConfigFile

__all__ = ["LlamaConfig"]

_border = Border("models")
# Models compute in fp32: of numbers beyond it, norms and angles would be zero, infinite or none.
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_SLOWEST = 1e-9  # of theta and of what divides frequencies: the angle at the longest position is finite

_LLAMA3_FIELDS = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LIMITS = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 20,
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama model; the names are those of Hugging Face's config.json.

    Args:
        num_key_value_heads: 0 means one per query head.
        head_dim: 0 means `hidden_size / num_attention_heads`.
        rope_scaling: None, or the `llama3` dictionary of Llama 3.1 and later.
        eos_token_ids: generation stops at any of them.
        dtype: what the weights are stored in, as config.json spells it; None when it does not say.

    Raises:
        ConfigError: sizes that do not fit together; names the field.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in _LIMITS:
            _require(
                _is_count(getattr(self, name)),
                name,
                "must be an integer, 0 or more",
                getattr(self, name),
                "correct it",
            )
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim:
            _require(
                self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0,
                "hidden_size",
                "must divide by num_attention_heads",
                f"{self.hidden_size} over {self.num_attention_heads}",
                "set head_dim, or choose sizes that divide",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        ends = self.eos_token_ids
        _require(isinstance(ends, tuple | list), "eos_token_ids", "must be a tuple of ids", ends, "write one")
        object.__setattr__(self, "eos_token_ids", tuple(ends))
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            _require(
                0 < value <= limit,
                name,
                f"must be a positive integer up to {limit}",
                value,
                "set one in that range",
            )
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_attention_heads",
            "must divide by num_key_value_heads",
            f"{self.num_attention_heads} over {self.num_key_value_heads}",
            "choose a divisor",
        )
        _require(
            self.head_dim % 2 == 0,
            "head_dim",
            "must be even",
            self.head_dim,
            "choose an even size (RoPE turns pairs)",
        )
        for name, low, example in (("rms_norm_eps", _TINY, "1e-5"), ("rope_theta", _SLOWEST, "10000")):
            value, rule = getattr(self, name), f"must lie in [{low:g}, {_HUGE:g}]"
            _require(_is_between(value, low, _HUGE), name, rule, value, f"use for example {example}")
        _require(
            isinstance(self.tie_word_embeddings, bool),
            "tie_word_embeddings",
            "must be true or false",
            self.tie_word_embeddings,
            "write one of them",
        )
        for name, tokens in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_ids)):
            for token in tokens:
                _require(
                    token is None or (_is_count(token) and token < self.vocab_size),
                    name,
                    f"must lie in the vocabulary, 0 to {self.vocab_size - 1}",
                    token,
                    "correct it",
                )
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _checked_scaling(self.rope_scaling))

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> LlamaConfig:
        """The configuration of a Hugging Face directory.

        Raises:
            ConfigError: no config.json, broken JSON, or a model that is not a Llama we compute.
        """
        from tilewise.models.llama.config_file import ConfigFile

        path = _border.path("llama", "a model directory", model_dir) / "config.json"
        if not os.path.lexists(path):
            raise ConfigError(
                f"[models.llama] a model directory must hold config.json; got {str(model_dir)!r}; "
                "give a Hugging Face directory"
            )
        try:
            file = read_json(path, ConfigFile)
        except Unreadable as error:
            raise ConfigError(
                f"[models.llama] config.json must be JSON as a Llama's; got {str(path)!r}: {error}; repair the file"
            ) from None
        return cls._from_file(file)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """The configuration that a parsed config.json describes.

        Raises:
            ConfigError: a field is missing or of another type, or asks for something this model does not compute.
        """
        from pydantic import ValidationError

        from tilewise.models.llama.config_file import ConfigFile

        try:
            file = ConfigFile.model_validate(_border.mapping("llama", "a configuration", data, "values"))
        except ValidationError as error:
            raise ConfigError(
                f"[models.llama] fields must be as in a Llama's config.json; got {first_problem(error)}; correct it"
            ) from None
        return cls._from_file(file)

    @classmethod
    def _from_file(cls, file: ConfigFile) -> LlamaConfig:
        _check_supported(file)
        theta, scaling = _rope_settings(file)
        eos = file.eos_token_id
        return cls(
            **{name: getattr(file, name) for name in _SIZES},
            num_key_value_heads=file.num_key_value_heads or 0,
            head_dim=file.head_dim or 0,
            max_position_embeddings=_or_default(file.max_position_embeddings, 2048),
            rms_norm_eps=_or_default(file.rms_norm_eps, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=file.tie_word_embeddings or False,
            bos_token_id=file.bos_token_id,
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            dtype=file.dtype or file.torch_dtype,
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as Hugging Face's config.json of a `LlamaForCausalLM`."""
        eos = self.eos_token_ids
        scaling = None if self.rope_scaling is None else dict(self.rope_scaling)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{name: getattr(self, name) for name in _LIMITS},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "initializer_range": self.initializer_range,
            "use_cache": True,
            **({} if self.dtype is None else {"torch_dtype": self.dtype}),
        }

    @property
    def initializer_range(self) -> float:
        """Standard deviation of random weights, by width (Nguyen and Salazar 2019, GPT-NeoX)."""
        return math.sqrt(2 / (5 * self.hidden_size))

    def num_parameters(self) -> int:
        """Elements of all parameters; a tied head counts once."""
        qo = 2 * self.hidden_size * self.num_attention_heads * self.head_dim
        kv = 2 * self.hidden_size * self.num_key_value_heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        vocabularies = 1 if self.tie_word_embeddings else 2
        return (
            vocabularies * self.vocab_size * self.hidden_size
            + self.num_hidden_layers * (qo + kv + mlp + 2 * self.hidden_size)
            + self.hidden_size
        )


def _require(holds: bool, field: str, rule: str, got: object, advice: str) -> None:
    if not holds:
        raise ConfigError(
            f"[models.llama] {field} {rule}; got {' '.join(got.split()) if isinstance(got, str) else shown(got)}; "
            f"{advice}"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_between(value: object, low: float, high: float) -> bool:
    """A number, not a truth value, in [low, high]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_supported(file: ConfigFile) -> None:
    architectures = file.architectures or ["LlamaForCausalLM"]
    _require(
        file.model_type in (None, "llama") and architectures == ["LlamaForCausalLM"],
        "architectures",
        "must be LlamaForCausalLM",
        f"{shown(file.model_type)} {shown(architectures)}",
        "give a Llama model",
    )
    for name in ("attention_bias", "mlp_bias"):
        value = getattr(file, name)
        _require(not value, name, "must be false", value, "models with biases are not supported")
    for name, computed in (("hidden_act", "silu"), ("partial_rotary_factor", 1)):
        value = getattr(file, name)
        _require(value in (None, computed), name, f"must be {computed}", value, "others are not supported")
    _require(
        file.quantization_config is None,
        "quantization_config",
        "must be absent",
        "a quantized model",
        "give the unquantized weights",
    )


def _rope_settings(file: ConfigFile) -> tuple[float, Mapping[str, Any] | None]:
    """theta and scaling from either spelling; `rope_parameters` (transformers 5) holds both in one
    dictionary."""
    if file.rope_parameters is not None and file.rope_scaling is not None:
        same = {**file.rope_scaling, "rope_theta": None} == {**file.rope_parameters, "rope_theta": None}
        _require(
            same, "rope_scaling", "must say what rope_parameters says", "two answers", "remove one of them"
        )
    parameters = dict(file.rope_parameters or file.rope_scaling or {})
    theta = _or_default(parameters.pop("rope_theta", None), _or_default(file.rope_theta, 10000.0))
    if parameters.get("rope_type", parameters.get("type", "default")) == "default":
        return theta, None
    return theta, parameters


def _checked_scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `llama3` scaling, with numbers that the formula can use."""
    _require(isinstance(scaling, Mapping), "rope_scaling", "must be a dictionary", scaling, "correct it")
    _require(
        scaling.get("partial_rotary_factor") in (None, 1),
        "partial_rotary_factor",
        "must be 1",
        scaling.get("partial_rotary_factor"),
        "others are not supported",
    )
    kind = scaling.get("rope_type", scaling.get("type"))
    _require(
        kind == "llama3",
        "rope_scaling",
        "must be absent or of type llama3",
        shown(kind),
        "other RoPE types are not supported",
    )
    missing = [name for name in _LLAMA3_FIELDS if name not in scaling]
    _require(
        not missing,
        "rope_scaling",
        f"must hold {', '.join(_LLAMA3_FIELDS)}",
        f"no {', '.join(missing)}",
        "add them",
    )
    for name in _LLAMA3_FIELDS:
        value, is_length = scaling[name], name == _LLAMA3_FIELDS[-1]
        holds = _is_between(value, _SLOWEST, _HUGE) and (not is_length or _is_count(value))
        rule = "must be a positive integer" if is_length else f"must lie in [{_SLOWEST:g}, {_HUGE:g}]"
        _require(holds, f"rope_scaling.{name}", rule, value, "correct it")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    _require(
        low < high,
        "rope_scaling.low_freq_factor",
        "must be below high_freq_factor",
        f"{low} and {high}",
        "correct them",
    )
    return {"rope_type": "llama3", **{name: scaling[name] for name in _LLAMA3_FIELDS}}
