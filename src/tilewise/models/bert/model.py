"""BERT as a graph: encoding of texts, and training by prediction of masked tokens.

Shapes: B batch, S sequence, D hidden, N heads x head size, F MLP, V vocabulary. Texts shorter than
S are padded at the end; attention ignores padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewise.core.dims import BATCH, MAX_SIZE, Dim, DimLabel, Size, upper_bound
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.ir.graph import TensorNode
from tilewise.models.bert.bert_config import BertConfig
from tilewise.models.decoder.model import activate
from tilewise.models.decoder.rotary_config import ACTIVATIONS
from tilewise.models.decoder.sharding import MLP, VOCAB
from tilewise.models.parts import STREAM, LayerUse, ModelParts
from tilewise.models.widths import default_k_splits
from tilewise.nn import GraphBuilder, layer, layer_norm, linear

__all__ = ["encoding_parts", "training_parts"]

_validate = Validator("models", ShapeError)


@layer
def encoder_layer(
    graph: GraphBuilder, x_BSD: TensorNode, lengths: TensorNode, *, config: BertConfig
) -> TensorNode:
    """One layer over whole texts `[B, S, D]`; norms come after the residuals."""
    d, f, heads, eps = (
        config.hidden_size,
        config.intermediate_size,
        DimLabel("heads", config.head_dim),
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


def _parts(
    call: str,
    config: BertConfig,
    sizes: tuple[int, Size],
    dtype: str,
    after: Callable[[GraphBuilder, TensorNode, Mapping[str, TensorNode]], None],
) -> ModelParts:
    """Embedding, layers, and the parts after them."""
    batch, seq = sizes
    _validate.integer(call, "batch", batch, 1, MAX_SIZE)
    longest = upper_bound(seq) if isinstance(seq, Dim) else seq
    _validate.integer(call, "seq", longest, 1, config.max_position_embeddings)
    width = config.hidden_size

    def before(graph: GraphBuilder) -> dict[str, TensorNode]:
        graph.prefer_k_splits(default_k_splits(config.num_attention_heads, config.num_attention_heads))
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
        return {STREAM: x, "lengths": lengths, "embedding": embedding}

    def layer_of(number: int) -> LayerUse:
        return LayerUse(encoder_layer, f"layers.{number}", ("lengths",), {"config": config})

    return ModelParts(before, config.num_hidden_layers, layer_of, after)


def encoding_parts(config: BertConfig, batch: int, seq: Size, dtype: str = "bf16") -> ModelParts:
    """The encoding of texts, as `models.build_encoding_graph` defines it.

    Raises:
        ShapeError: a size is invalid, or `seq` exceeds the model's positions.
    """

    def after(graph: GraphBuilder, x: TensorNode, named: Mapping[str, TensorNode]) -> None:
        graph.output(x, "hidden")

    return _parts("build_encoding_graph", config, (batch, seq), dtype, after)


def training_parts(config: BertConfig, batch: int, seq: Size, dtype: str = "bf16") -> ModelParts:
    """One step of masked-language training, as `models.build_training_graph` defines it.

    Raises:
        ShapeError: a size is invalid, or `seq` exceeds the model's positions.
    """

    def after(graph: GraphBuilder, x: TensorNode, named: Mapping[str, TensorNode]) -> None:
        labels = graph.input([batch, seq], "i32", name="labels", labels=[BATCH, None], storage="scalars")
        x = linear(graph, x, "head.dense.weight", config.hidden_size, bias=True)
        x = activate(graph, x, ACTIVATIONS[config.hidden_act])
        x = layer_norm(graph, x, "head.norm", eps=config.layer_norm_eps)
        bias = graph.parameter([config.vocab_size], dtype, name="head.bias", labels=[VOCAB], init="zeros")
        logits = graph.add_bias(graph.matmul(x, named["embedding"], trans_b=True), bias)
        loss, rows = graph.mean_cross_entropy(logits, labels)
        graph.output(rows, "loss_rows")
        graph.loss(loss)

    return _parts("build_training_graph", config, (batch, seq), dtype, after)
