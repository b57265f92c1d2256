"""The configuration of BERT: absolute positions, LayerNorm after every block, an activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.dtypes import MAX_F32, MIN_F32
from tilewise.core.validation import Validator
from tilewise.models.decoder.rotary_config import ACTIVATIONS, MAX_HEAD_DIM
from tilewise.models.model_config import ModelConfig

__all__ = ["BertConfig"]

_validate = Validator("models")


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """Settings of a BERT encoder, with the names of Hugging Face's config.json.

    Attributes:
        type_vocab_size: number of segment types.
        hidden_act: the MLP's activation.
        layer_norm_eps: of all norms.
    """

    max_position_embeddings: int = 512
    tie_word_embeddings: bool = True
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertForMaskedLM"
    also: ClassVar[tuple[str, ...]] = ("BertModel", "BertForPreTraining")
    only: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "is_causal": (False,),
        "causal": (False,),
    }
    # fields of the pooler and of early files for TensorFlow
    without_effect: ClassVar[frozenset[str]] = frozenset(
        (
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        )
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.model_type
        divides = self.hidden_size % self.num_attention_heads == 0
        got = f"{self.hidden_size} over {self.num_attention_heads}"
        _validate.require(
            family,
            divides,
            "hidden_size",
            "must divide by num_attention_heads",
            got,
            "choose sizes that divide",
        )
        _validate.integer(family, "hidden_size / num_attention_heads", self.head_dim, 2, MAX_HEAD_DIM)
        _validate.choice(family, "hidden_act", self.hidden_act, ACTIVATIONS)
        _validate.number(family, "layer_norm_eps", self.layer_norm_eps, MIN_F32, MAX_F32)
        tied = self.tie_word_embeddings
        _validate.require(
            family,
            tied,
            "tie_word_embeddings",
            "must be true",
            tied,
            "encoders whose head is not the embedding are not supported",
        )

    @classmethod
    def limits(cls) -> Mapping[str, int]:
        """Of segments."""
        return {"type_vocab_size": 1 << 10}

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_attention_heads
