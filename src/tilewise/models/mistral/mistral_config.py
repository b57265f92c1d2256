"""The configuration of Mistral: v0.1 with a sliding window, v0.2 and v0.3 without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.models.decoder.architecture import Decoder
from tilewise.models.decoder.rotary_config import RotaryConfig, layer_kinds

__all__ = ["MistralConfig"]


@dataclass(frozen=True)
class MistralConfig(RotaryConfig):
    """Settings of a Mistral model, with the names of Hugging Face's config.json.

    Attributes:
        sliding_window: number of positions that a query attends to, including its own, in every
            layer; None: all.
    """

    max_position_embeddings: int = 131072
    num_key_value_heads: int = 8
    sliding_window: int | None = 4096

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("MistralModel",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.decoder

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.as_decoder(layer_kinds(self, (kind,) * self.num_hidden_layers, self.sliding_window))
