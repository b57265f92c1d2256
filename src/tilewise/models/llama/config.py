"""Configuration of a Llama model: what the graph needs to know, read from and written to Hugging Face's
config.json.

Refuses, with the field's name, everything the graph does not compute (biases, other activations, other RoPE
types, other architectures), so that a model is never run as something it is not. Reads both spellings of RoPE
settings (`rope_theta` with `rope_scaling`, and `rope_parameters`). Comes from a file or a training
configuration; goes to model.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.core.errors import ConfigError

__all__ = ["LlamaConfig"]

_LLAMA3_FIELDS = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
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

    def __post_init__(self) -> None:
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
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            _require(
                isinstance(value, int) and 0 < value <= limit,
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
        _require(
            0 < self.rms_norm_eps < math.inf,
            "rms_norm_eps",
            "must be positive and finite",
            self.rms_norm_eps,
            "use for example 1e-5",
        )
        _require(
            0 < self.rope_theta < math.inf,
            "rope_theta",
            "must be positive and finite",
            self.rope_theta,
            "use for example 10000",
        )
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _checked_scaling(self.rope_scaling))

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> LlamaConfig:
        """The configuration of a Hugging Face directory.

        Raises:
            ConfigError: no config.json, broken JSON, or a model that is not a Llama we compute.
        """
        path = Path(model_dir) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"[models.llama] a model directory must hold config.json; got {str(model_dir)!r}; "
                "give a Hugging Face directory"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"[models.llama] config.json must be JSON; got {path}: {error}; repair the file"
            ) from None
        if not isinstance(data, dict):
            raise ConfigError(
                f"[models.llama] config.json must be a JSON object; got {path}; repair the file"
            )
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """The configuration that a parsed config.json describes.

        Raises:
            ConfigError: a field is missing, or asks for something this model does not compute.
        """
        _check_supported(data)
        theta, scaling = _rope_settings(data)
        eos = data.get("eos_token_id")
        return cls(
            **{name: int(_field(data, name)) for name in list(_LIMITS)[:5]},
            num_key_value_heads=int(data.get("num_key_value_heads") or 0),
            head_dim=int(data.get("head_dim") or 0),
            max_position_embeddings=int(data.get("max_position_embeddings") or 2048),
            rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
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
            "initializer_range": 0.02,
            "use_cache": True,
        }

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
        raise ConfigError(f"[models.llama] {field} {rule}; got {got}; {advice}")


def _field(data: Mapping[str, Any], name: str) -> Any:
    _require(data.get(name) is not None, name, "must stand in config.json", "nothing", "add it")
    return data[name]


def _check_supported(data: Mapping[str, Any]) -> None:
    architectures = data.get("architectures") or ["LlamaForCausalLM"]
    _require(
        data.get("model_type", "llama") == "llama" and architectures == ["LlamaForCausalLM"],
        "architectures",
        "must be LlamaForCausalLM",
        f"{data.get('model_type')} {architectures}",
        "give a Llama model",
    )
    for name in ("attention_bias", "mlp_bias"):
        _require(
            not data.get(name), name, "must be false", data.get(name), "models with biases are not supported"
        )
    activation = data.get("hidden_act", "silu")
    _require(
        activation == "silu", "hidden_act", "must be silu", activation, "other activations are not supported"
    )
    _require(
        data.get("quantization_config") is None,
        "quantization_config",
        "must be absent",
        "a quantized model",
        "give the unquantized weights",
    )


def _rope_settings(data: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """theta and scaling from either spelling; `rope_parameters` (transformers 5) holds both in one
    dictionary."""
    parameters = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or data.get("rope_theta") or 10000.0)
    if parameters.get("rope_type", parameters.get("type", "default")) == "default":
        return theta, None
    return theta, parameters


def _checked_scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    kind = scaling.get("rope_type", scaling.get("type"))
    _require(
        kind == "llama3",
        "rope_scaling",
        "must be absent or of type llama3",
        kind,
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
    return {"rope_type": "llama3", **{name: scaling[name] for name in _LLAMA3_FIELDS}}
