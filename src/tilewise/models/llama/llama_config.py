"""The configuration of Llama 2 and 3: every RoPE scaling, optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rotary_config import RotaryConfig

__all__ = ["LlamaConfig"]

_validate = Validator("models")


@dataclass(frozen=True)
class LlamaConfig(RotaryConfig):
    """Settings of a Llama model, with the names of Hugging Face's config.json.

    Attributes:
        attention_bias: the four projections of attention have biases.
        mlp_bias: the projections of the MLP have biases.
    """

    attention_bias: bool = False
    mlp_bias: bool = False

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("LlamaModel", "LLaMAForCausalLM")
    only: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "is_llama_config": (True,),
        "rope_interleaved": (False,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.truth(self.model_type, "attention_bias", self.attention_bias)
        _validate.truth(self.model_type, "mlp_bias", self.mlp_bias)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        return self.as_decoder(
            (LayerKind(),) * self.num_hidden_layers,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
        )
