"""The configuration of Gemma 2: GeGLU, `1 + w` norms before and after blocks, soft caps, sliding
windows in every other layer, and a scaled embedding that is also the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewise.core.dtypes import MAX_F32, MIN_F32
from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rotary_config import RotaryConfig, layer_kinds

__all__ = ["Gemma2Config", "GemmaConfig"]

_validate = Validator("models")

# Fields of early files, and the field with the same meaning.
_DUPLICATES = {"hidden_act": "hidden_activation", "sliding_window_size": "sliding_window"}


@dataclass(frozen=True)
class GemmaConfig(RotaryConfig):
    """The common settings of Gemma 2 and 3.

    Attributes:
        query_pre_attn_scalar: scores are divided by its square root.
        sliding_window: number of positions that queries of sliding layers attend to.
        layer_types: `full_attention` or `sliding_attention` per layer; None: the pattern of the
            generation.
        attn_logit_softcapping: of scores; None: no cap.
        final_logit_softcapping: of logits; None: no cap.
        attention_bias: the four projections of attention have biases.
    """

    tie_word_embeddings: bool = True
    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_act: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_bias: bool = False

    spellings: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.model_type
        _validate.integer(family, "query_pre_attn_scalar", self.query_pre_attn_scalar, 1, 1 << 30)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, name) is not None:
                _validate.number(family, name, getattr(self, name), MIN_F32, MAX_F32)
        _validate.truth(family, "attention_bias", self.attention_bias)
        self.kinds()

    @classmethod
    def _adapted(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        for duplicate, name in _DUPLICATES.items():
            value = cls.agreed_value(duplicate, data.pop(duplicate, None), name, data.get(name))
            if value is not None:
                data[name] = value
        return super()._adapted(data)

    def every(self, period: int) -> tuple[str, ...]:
        """Names of layers of which each `period`-th has full attention."""
        count = self.num_hidden_layers
        return tuple("full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count))

    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return layer_kinds(
            self, self.every(2) if self.layer_types is None else self.layer_types, self.sliding_window
        )

    def as_gemma(self, layers: tuple[LayerKind, ...], **choices: Any) -> Decoder:
        """A decoder with the common properties of all Gemmas."""
        return self.as_decoder(
            layers,
            norm_offset=1.0,
            norms_after=True,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            attention_scale=self.query_pre_attn_scalar**-0.5,
            attention_softcap=self.attn_logit_softcapping,
            logits_softcap=self.final_logit_softcapping,
            embedding_scale=math.sqrt(self.hidden_size),
            rounds_embedding_scale=True,
            **choices,
        )


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """Sizes and constants of a Gemma 2 model; the names are those of Hugging Face's config.json."""

    max_position_embeddings: int = 8192
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Gemma2Model",)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        return self.as_gemma(self.kinds())
