"""BERT as a graph: encoding of texts, and training by prediction of masked tokens.

Shapes: B batch, S sequence, D hidden, N heads x head size, F MLP, V vocabulary. Texts shorter than S end in padding,
which no token of theirs sees.
"""

from __future__ import annotations

from tilewise.core.border import Border
from tilewise.core.dims import MAX_SIZE, Dim, Size, upper_bound
from tilewise.core.errors import ShapeError
from tilewise.ir.graph import TensorNode
from tilewise.models.bert.config import BertConfig
from tilewise.models.bert.sharding import BATCH, MLP, VOCAB, heads_label
from tilewise.models.decoder.config import ACTIVATIONS
from tilewise.models.decoder.model import activate
from tilewise.nn import GraphBuilder, layer, layer_norm, linear

__all__ = ["build_encoding_graph", "build_training_graph"]

_border = Border("models", ShapeError)


@layer
def encoder_layer(
    graph: GraphBuilder, x_BSD: TensorNode, lengths: TensorNode, *, config: BertConfig
) -> TensorNode:
    """One layer over whole texts `[B, S, D]`; norms stand behind the residuals."""
    d, f, heads, eps = (
        config.hidden_size,
        config.intermediate_size,
        heads_label(config),
        config.layer_norm_eps,
    )
    q_BSN, k_BSN, v_BSN = (
        linear(graph, x_BSD, f"self_attn.{name}_proj.weight", d, out_label=heads, bias=True) for name in "qkv"
    )
    attended = graph.scaled_dot_product_attention(
        q_BSN, k_BSN, v_BSN, head_dim=config.head_dim, causal=False, lengths=lengths
    )
    attended = linear(graph, attended, "self_attn.o_proj.weight", d, in_label=heads, bias=True)
    x = layer_norm(graph, graph.add(x_BSD, attended), "attention_norm", eps=eps)
    inner = linear(graph, x, "mlp.up_proj.weight", f, out_label=MLP, bias=True)
    inner = activate(graph, inner, ACTIVATIONS[config.hidden_act])
    down = linear(graph, inner, "mlp.down_proj.weight", d, in_label=MLP, bias=True)
    return layer_norm(graph, graph.add(x, down), "mlp_norm", eps=eps)


def _encode(
    graph: GraphBuilder, config: BertConfig, batch: int, seq: Size, dtype: str
) -> tuple[TensorNode, TensorNode]:
    """The vectors of all tokens `[B, S, D]`, and the embedding."""
    width = config.hidden_size
    tokens = graph.input([batch, seq], "i32", name="tokens", labels=[BATCH, None], storage="scalars")
    types = graph.input([batch, seq], "i32", name="token_types", labels=[BATCH, None], storage="scalars")
    lengths = graph.input([batch], "i32", name="lengths", labels=[BATCH], storage="scalars")
    embedding = graph.parameter(
        [config.vocab_size, width], dtype, name="embed_tokens.weight", labels=[VOCAB, None]
    )
    rows = [config.max_position_embeddings, width]
    places = graph.parameter(rows, dtype, name="embed_positions.weight")
    kinds = graph.parameter([config.type_vocab_size, width], dtype, name="embed_token_types.weight")
    x = graph.add(graph.embedding(tokens, embedding), graph.embedding(types, kinds))
    x = graph.add(x, graph.embedding(graph.positions(tokens), places))
    x = layer_norm(graph, x, "embed_norm", eps=config.layer_norm_eps)
    for i in range(config.num_hidden_layers):
        x = encoder_layer(graph, x, lengths, path=f"layers.{i}", config=config)
    return x, embedding


def _check(call: str, graph: GraphBuilder, config: BertConfig, batch: int, seq: Size) -> None:
    _border.instance(call, "the first argument", graph, GraphBuilder, "pass the graph")
    _border.instance(call, "config", config, BertConfig, "pass a BertConfig")
    _border.integer(call, "batch", batch, 1, MAX_SIZE)
    longest = upper_bound(seq) if isinstance(seq, Dim) else seq
    _border.integer(call, "seq", longest, 1, config.max_position_embeddings)


def build_encoding_graph(
    graph: GraphBuilder, config: BertConfig, batch: int, seq: Size, dtype: str = "bf16"
) -> None:
    """Describe the encoding of texts in an empty graph.

    Inputs, i32: tokens and token_types `[B, S]`, lengths `[B]`. Output: hidden `[B, S, D]`, of which rows behind a
    text's length say nothing.

    Args:
        graph: written to.
        config: the model.
        batch: texts of one call.
        seq: tokens of each, or a `Dim` with a bound.
        dtype: of weights and activations.

    Raises:
        ShapeError: a size that no graph has, or `seq` exceeds the model's positions.
    """
    _check("build_encoding_graph", graph, config, batch, seq)
    with graph.all_or_nothing():
        graph.output(_encode(graph, config, batch, seq, dtype)[0], "hidden")


def build_training_graph(
    graph: GraphBuilder, config: BertConfig, batch: int, seq: Size, dtype: str = "bf16"
) -> None:
    """Describe one step of masked-language training in an empty graph.

    Inputs, i32: tokens, token_types and labels `[B, S]` (labels of -100 are not counted), lengths `[B]`. Outputs: loss
    `[1]`, loss_rows `[B, S]`.

    Args:
        graph: written to.
        config: the model.
        batch: sequences per step, over all devices and microbatches.
        seq: tokens per sequence, or a `Dim` with a bound.
        dtype: of weights and activations; sums, gradients and optimizer state are fp32.

    Raises:
        ShapeError: a size that no graph has, or `seq` exceeds the model's positions.
    """
    _check("build_training_graph", graph, config, batch, seq)
    with graph.all_or_nothing():
        x, embedding = _encode(graph, config, batch, seq, dtype)
        labels = graph.input([batch, seq], "i32", name="labels", labels=[BATCH, None], storage="scalars")
        x = linear(graph, x, "head.dense.weight", config.hidden_size, bias=True)
        x = activate(graph, x, ACTIVATIONS[config.hidden_act])
        x = layer_norm(graph, x, "head.norm", eps=config.layer_norm_eps)
        bias = graph.parameter([config.vocab_size], dtype, name="head.bias", labels=[VOCAB], init="zeros")
        logits = graph.add_bias(graph.matmul(x, embedding, transpose_b=True), bias)
        loss, rows = graph.mean_cross_entropy(logits, labels)
        graph.output(rows, "loss_rows")
        graph.loss(loss)
