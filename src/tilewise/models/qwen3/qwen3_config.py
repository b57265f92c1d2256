"""The configuration of Qwen3: norms of queries and keys, an independent head size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder
from tilewise.models.qwen2.qwen2_config import QwenConfig

__all__ = ["Qwen3Config"]

_validate = Validator("models")


@dataclass(frozen=True)
class Qwen3Config(QwenConfig):
    """Settings of a Qwen3 model, with the names of Hugging Face's config.json.

    Attributes:
        attention_bias: the four projections of attention have biases.
    """

    head_dim: int = 128
    attention_bias: bool = False

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Qwen3Model",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.truth(self.model_type, "attention_bias", self.attention_bias)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        bias = self.attention_bias
        return self.as_decoder(self.kinds(), qk_norm="head", qkv_bias=bias, out_bias=bias)
