"""The description of a decoder in terms that are common to all families. Graphs are made from it.

A family's configuration (its `*_config.py`) translates config.json to this description, and
`model.py` makes the graph. A family with a new combination of choices needs no model code.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.models.decoder.rope import Rope

__all__ = ["Decoder", "LayerKind"]


@dataclass(frozen=True)
class LayerKind:
    """The attention of one layer.

    Attributes:
        window: number of positions that a query attends to, including its own; None: all before it.
        rope: index of the decoder's rope that rotates its queries and keys; None: no rotation.
    """

    window: int | None = None
    rope: int | None = 0


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer: embedding, layers of attention and MLP with residuals, norm,
    head.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width inside of the MLP.
        num_heads: query heads.
        num_kv_heads: heads of keys and values; divides `num_heads`.
        head_dim: size of a head, even.
        max_positions: the longest context that it supports.
        layers: the kind of every layer.
        ropes: rotary positions that layers refer to.
        learned_positions: rows of a table of positions that is added to the embedding; 0: no table.
        tied_head: the head is the embedding.
        norm: `rms`, or `layer` (LayerNorm with bias).
        norm_eps: of all norms.
        norm_offset: added to the gains of RMS norms (1 for Gemma, whose files have gain - 1).
        norms_before: there is a norm before attention and before the MLP.
        norms_after: there is a norm after attention and after the MLP, before each is added to the
            stream.
        qk_norm: queries and keys are normalized before they are rotated: `head`, each head; `row`, all
            heads of a token together; None: not at all.
        qkv_bias: the projections of queries, keys and values have biases.
        out_bias: the output projection of attention has a bias.
        mlp_bias: the projections of the MLP have biases.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
        gated: the MLP multiplies its activation by a second projection.
        attention_scale: of the scores; None: 1 / sqrt(head_dim).
        attention_softcap: scores become `cap * tanh(score / cap)`; None: no cap.
        logits_softcap: likewise for logits.
        embedding_scale: factor on the embedding.
        rounds_embedding_scale: this factor is first rounded to the model's dtype (Gemma).
        residual_scale: factor on the results of attention and MLP before each is added to the stream.
        logits_scale: factor on the logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    layers: tuple[LayerKind, ...]
    ropes: tuple[Rope, ...] = ()
    learned_positions: int = 0
    tied_head: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    norms_before: bool = True
    norms_after: bool = False
    qk_norm: str | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    @property
    def q_size(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def default_context(self) -> int:
        """The default context limit; at most `max_positions`."""
        return min([self.max_positions, *(rope.default_context for rope in self.ropes)])

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim
