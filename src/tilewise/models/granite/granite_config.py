"""The configuration of dense Granite 3: like Llama, with factors on embedding, scores, residuals and
logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rotary_config import RotaryConfig

__all__ = ["GraniteConfig"]

_validate = Validator("models")
_FACTORS = (1e-6, 1e6)  # least and largest; beyond them, bf16 values of any model overflow or vanish


@dataclass(frozen=True)
class GraniteConfig(RotaryConfig):
    """Settings of a Granite model, with the names of Hugging Face's config.json.

    Attributes:
        attention_bias: the four projections of attention have biases.
        mlp_bias: the projections of the MLP have biases.
        embedding_multiplier: factor on the embedding.
        attention_multiplier: factor on the scores, instead of 1 / sqrt(head_dim).
        residual_multiplier: factor on the results of attention and MLP, before each is added to the
            stream.
        logits_scaling: divisor of the logits.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    model_type: ClassVar[str] = "granite"
    architecture: ClassVar[str] = "GraniteForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("GraniteModel",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention_bias", "mlp_bias"):
            _validate.truth(self.model_type, name, getattr(self, name))
        for name in (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ):
            _validate.number(self.model_type, name, getattr(self, name), *_FACTORS)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        return self.as_decoder(
            (LayerKind(),) * self.num_hidden_layers,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            attention_scale=self.attention_multiplier,
            embedding_scale=self.embedding_multiplier,
            residual_scale=self.residual_multiplier,
            logits_scale=1 / self.logits_scaling,
        )
