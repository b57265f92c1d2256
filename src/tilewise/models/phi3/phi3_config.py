"""The configuration of Phi-3 and Phi-4-mini: short and long contexts (`longrope`), heads that are
rotated in part, a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewise.core.dtypes import MIN_F32
from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder
from tilewise.models.decoder.rope import Rope
from tilewise.models.decoder.rotary_config import RotaryConfig, layer_kinds

__all__ = ["Phi3Config"]

_validate = Validator("models")


@dataclass(frozen=True)
class Phi3Config(RotaryConfig):
    """Settings of a Phi-3 model, with the names of Hugging Face's config.json.

    Attributes:
        original_max_position_embeddings: context up to which `longrope` uses its short factors.
        sliding_window: number of positions that a query attends to, including its own, in every
            layer; None: all.
        partial_rotary_factor: share of a head's elements that are rotated, the first ones; the
            others do not depend on the position.
    """

    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: int = 4096
    sliding_window: int | None = None
    partial_rotary_factor: float = 1.0

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Phi3Model",)
    only: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
        # in Phi-4-mini's files; transformers does not read them
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),
    }

    def __post_init__(self) -> None:
        name = "partial_rotary_factor"
        _validate.number(self.model_type, name, self.partial_rotary_factor, MIN_F32, 1.0)
        super().__post_init__()
        _validate.integer(
            self.model_type,
            "original_max_position_embeddings",
            self.original_max_position_embeddings,
            2,
            1 << 30,
        )
        kind = None if self.rope_scaling is None else self.rope_scaling["rope_type"]
        _validate.require(
            self.model_type,
            kind in (None, "longrope"),
            "rope_scaling",
            "must be absent or longrope",
            kind,
            "correct it",
        )
        _ = self.decoder

    @classmethod
    def _adapted(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        for key in ("rope_scaling", "rope_parameters"):
            scaling = data.get(key)
            if not isinstance(scaling, Mapping):
                continue
            plain = {k: v for k, v in scaling.items() if k != "original_max_position_embeddings"}
            if plain.get("rope_type", plain.get("type")) in ("su", "yarn"):  # the names in early files
                plain = {**{k: v for k, v in plain.items() if k != "type"}, "rope_type": "longrope"}
            data[key] = plain
            name = "original_max_position_embeddings"
            data[name] = cls.agreed_value(name, data.get(name), f"{key}.{name}", scaling.get(name))
        return super()._adapted(data)

    def rope(self) -> Rope:
        """The rotary positions; `original_max_position_embeddings` separates short from long contexts."""
        scaling = self.rope_scaling
        if scaling is not None:
            scaling = {**scaling, "original_max_position_embeddings": self.original_max_position_embeddings}
        return Rope(self.rope_theta, self.max_position_embeddings, scaling, self.rotary_dim)

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)  # rounded down, as in transformers

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.as_decoder(layer_kinds(self, (kind,) * self.num_hidden_layers, self.sliding_window))
