"""The configuration of OLMo 2: norms after blocks instead of before, norms of queries and keys over
all heads of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rotary_config import RotaryConfig

__all__ = ["Olmo2Config"]

_validate = Validator("models")


@dataclass(frozen=True)
class Olmo2Config(RotaryConfig):
    """Settings of an OLMo 2 model, with the names of Hugging Face's config.json.

    Attributes:
        attention_bias: the four projections of attention have biases.
    """

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Olmo2Model",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.truth(self.model_type, "attention_bias", self.attention_bias)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        return self.as_decoder(
            (LayerKind(),) * self.num_hidden_layers,
            norms_before=False,
            norms_after=True,
            qk_norm="row",
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
        )
