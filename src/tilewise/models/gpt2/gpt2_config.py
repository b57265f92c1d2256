"""The configuration of GPT-2: learned positions, LayerNorm, biases, a tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewise.core.dtypes import MAX_F32, MIN_F32
from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rotary_config import ACTIVATIONS, MAX_HEAD_DIM
from tilewise.models.model_config import ModelConfig

__all__ = ["GPT2Config"]

_validate = Validator("models")


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Settings of a GPT-2 model; files name them `n_embd`, `n_head` and so on.

    Attributes:
        hidden_act: the MLP's activation.
        layer_norm_epsilon: of all norms.
        scale_attn_weights: scores are divided by the square root of the head size.
    """

    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    also: ClassVar[tuple[str, ...]] = ("GPT2Model",)
    spellings: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
    }
    only: ClassVar[Mapping[str, tuple[object, ...]]] = {"scale_attn_by_inverse_layer_idx": (False,)}
    without_effect: ClassVar[frozenset[str]] = frozenset(
        (
            "n_ctx",
            "n_special",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        )
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.model_type
        divides = self.hidden_size % self.num_attention_heads == 0
        got = f"{self.hidden_size} over {self.num_attention_heads}"
        _validate.require(family, divides, "n_embd", "must divide by n_head", got, "choose sizes that divide")
        _validate.integer(
            family, "n_embd / n_head", self.hidden_size // self.num_attention_heads, 2, MAX_HEAD_DIM
        )
        _validate.choice(family, "activation_function", self.hidden_act, ACTIVATIONS)
        _validate.number(family, "layer_norm_epsilon", self.layer_norm_epsilon, MIN_F32, MAX_F32)
        _validate.truth(family, "scale_attn_weights", self.scale_attn_weights)

    @classmethod
    def _adapted(cls, data: dict[str, Any]) -> dict[str, Any]:
        width = data.get("n_embd")
        if data.get("n_inner") is None and isinstance(width, int):
            data = {**data, "n_inner": 4 * width}
        return super()._adapted(data)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        return Decoder(
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_attention_heads,
            self.hidden_size // self.num_attention_heads,
            self.max_position_embeddings,
            (LayerKind(rope=None),) * self.num_hidden_layers,
            learned_positions=self.max_position_embeddings,
            tied_head=self.tie_word_embeddings,
            norm="layer",
            norm_eps=self.layer_norm_epsilon,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            activation=ACTIVATIONS[self.hidden_act],
            gated=False,
            attention_scale=None if self.scale_attn_weights else 1.0,
        )
