"""The graph of any decoder: one layer template per kind of layer, for training and for generation.

Shapes: B batch, S sequence, T flattened tokens, D hidden, N heads x head size, K KV heads x head
size, F MLP, V vocabulary. The model does not know devices; the labels of its dims (`sharding.py`)
say what strategies may shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tilewise.core.dims import MAX_SIZE, Dim, Size, upper_bound
from tilewise.core.dtypes import KV_CACHE_DTYPES, DType
from tilewise.core.dtypes import dtype as dtype_of
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.graph.ops.attention import int8_columns
from tilewise.ir.graph import TensorNode, TensorSpec
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rope import rope_table
from tilewise.models.decoder.sharding import BATCH, MLP, VOCAB, heads_label, kv_heads_label
from tilewise.models.parts import STREAM, LayerUse, ModelParts
from tilewise.models.widths import default_k_splits
from tilewise.nn import (
    GraphBuilder,
    PreferenceLoss,
    layer,
    layer_norm,
    linear,
    preference_loss,
    rms_norm,
)

__all__ = ["BLOCK_SIZE", "GATES", "activate", "decoding_parts", "training_parts"]

BLOCK_SIZE = 64
"""Positions of a block of the KV cache."""
GATES = "adapter_gates.weight"
"""The parameter `[adapters + 1, columns]` with the gates of each adapter; those of row 0 are zeros."""
_validate = Validator("models", ShapeError)


def activate(graph: GraphBuilder, x: TensorNode, name: str) -> TensorNode:
    """Apply an activation by its name in `Decoder.activation`."""
    if name in ("silu", "relu"):
        return graph.silu(x) if name == "silu" else graph.relu(x)
    return graph.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def _norm(graph: GraphBuilder, x: TensorNode, name: str, decoder: Decoder) -> TensorNode:
    if decoder.norm == "layer":
        return layer_norm(graph, x, name, eps=decoder.norm_eps)
    return rms_norm(graph, x, f"{name}.weight", eps=decoder.norm_eps, offset=decoder.norm_offset)


def _attention_input(graph: GraphBuilder, x: TensorNode, decoder: Decoder) -> TensorNode:
    return _norm(graph, x, "input_layernorm", decoder) if decoder.norms_before else x


def _projected(
    graph: GraphBuilder,
    name: str,
    h: TensorNode,
    positions: TensorNode,
    tables: tuple[TensorNode, ...],
    decoder: Decoder,
) -> TensorNode:
    """Queries ("q"), keys or values, normalized and rotated as the model needs."""
    size, label = decoder.kv_size, kv_heads_label(decoder)
    if name == "q":
        size, label = decoder.q_size, heads_label(decoder)
    weight = f"self_attn.{name}_proj.weight"
    x = linear(graph, h, weight, size, out_label=label, bias=decoder.qkv_bias)
    if name != "v" and decoder.qk_norm is not None:
        norm = f"self_attn.{name}_norm.weight"
        eps, offset = decoder.norm_eps, decoder.norm_offset
        # a norm of rows needs all heads: where devices share them, the planner gathers its input
        head_dim = decoder.head_dim if decoder.qk_norm == "head" else None
        x = rms_norm(graph, x, norm, eps=eps, offset=offset, head_dim=head_dim)
    if name != "v" and tables:
        x = graph.rope(x, positions, tables[0], head_dim=decoder.head_dim)
    return x


def _after_attention(
    graph: GraphBuilder, x: TensorNode, attended: TensorNode, decoder: Decoder
) -> TensorNode:
    """Output projection, MLP, and the two residuals."""
    d, f = decoder.hidden_size, decoder.intermediate_size
    scale = (2 * len(decoder.layers)) ** -0.5  # as in GPT-2: the sum of all residuals has the variance of one
    attended = linear(
        graph,
        attended,
        "self_attn.o_proj.weight",
        d,
        in_label=heads_label(decoder),
        init_scale=scale,
        bias=decoder.out_bias,
    )
    if decoder.norms_after:
        attended = _norm(graph, attended, "post_attention_layernorm", decoder)
    x = h = graph.add(x, _scaled(graph, attended, decoder.residual_scale))
    if decoder.norms_before:
        before = "pre_feedforward_layernorm" if decoder.norms_after else "post_attention_layernorm"
        h = _norm(graph, x, before, decoder)
    bias = decoder.mlp_bias
    if decoder.gated:
        gate = linear(graph, h, "mlp.gate_proj.weight", f, out_label=MLP, bias=bias)
        up = linear(graph, h, "mlp.up_proj.weight", f, out_label=MLP, bias=bias)
        inner = graph.mul(activate(graph, gate, decoder.activation), up)
    else:
        up = linear(graph, h, "mlp.up_proj.weight", f, out_label=MLP, bias=bias)
        inner = activate(graph, up, decoder.activation)
    down = linear(graph, inner, "mlp.down_proj.weight", d, in_label=MLP, init_scale=scale, bias=bias)
    if decoder.norms_after:
        down = _norm(graph, down, "post_feedforward_layernorm", decoder)
    return graph.add(x, _scaled(graph, down, decoder.residual_scale))


def _scaled(graph: GraphBuilder, x: TensorNode, factor: float) -> TensorNode:
    return x if factor == 1.0 else graph.scale(x, factor)


@layer
def decoder_layer(
    graph: GraphBuilder,
    x_BSD: TensorNode,
    positions: TensorNode,
    *tables: TensorNode,
    decoder: Decoder,
    kind: LayerKind,
    has_documents: bool = False,
) -> TensorNode:
    """One layer over whole sequences `[B, S, D]`; `tables` is the layer's RoPE table, if it has one.
    With `has_documents`, the last operand is the first position that each token attends to.
    """
    first = None
    if has_documents:
        *tables, first = tables  # type: ignore[assignment]
    h = _attention_input(graph, x_BSD, decoder)
    q_BSN, k_BSK, v_BSK = (_projected(graph, name, h, positions, tables, decoder) for name in "qkv")
    attended = graph.scaled_dot_product_attention(
        q_BSN,
        k_BSK,
        v_BSK,
        head_dim=decoder.head_dim,
        causal=True,
        scale=decoder.attention_scale,
        window=kind.window,
        softcap=decoder.attention_softcap,
        first=first,
    )
    return _after_attention(graph, x_BSD, attended, decoder)


def cache_columns(decoder: Decoder, kv_cache_dtype: str) -> tuple[int, bool]:
    """Columns of a layer's keys or values in the cache, and whether it is int8 (and its dtype i32).

    Raises:
        ShapeError: the head size is not a multiple of 4, as a cache of int8 needs.
    """
    _validate.choice("build_decoding_graph", "kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    is_int8 = kv_cache_dtype == "int8"
    if is_int8 and decoder.head_dim % 4:
        rule = "a KV cache of int8 needs a head size that is a multiple of 4"
        _validate.invalid("build_decoding_graph", rule, str(decoder.head_dim), "keep kv_cache_dtype auto")
    return decoder.num_kv_heads * (int8_columns(decoder.head_dim) if is_int8 else decoder.head_dim), is_int8


def _caches(
    decoder: Decoder, num_blocks: int, dtype: str | DType, kv_cache_dtype: str
) -> tuple[TensorSpec, TensorSpec]:
    """One layer's KV cache: keys, values."""
    columns, is_int8 = cache_columns(decoder, kv_cache_dtype)
    label = replace(kv_heads_label(decoder), atom=columns // decoder.num_kv_heads)
    shape, labels = (num_blocks * BLOCK_SIZE, columns), (None, label)
    stored = dtype_of("i32" if is_int8 else dtype)
    keys, values = (TensorSpec(shape, stored, labels, f"self_attn.{name}") for name in ("k_cache", "v_cache"))
    return keys, values


@layer
def cached_layer(
    graph: GraphBuilder,
    x_TD: TensorNode,
    positions: TensorNode,
    slots: TensorNode,
    sequence: TensorNode,
    block_table: TensorNode,
    *tables: TensorNode,
    decoder: Decoder,
    kind: LayerKind,
    num_blocks: int,
    kv_cache_dtype: str,
    has_gates: bool = False,
) -> TensorNode:
    """One layer over flattened tokens `[T, D]` and a KV cache in blocks. With `has_gates`, the last
    operand is the gates of adapters.
    """
    if has_gates:
        *tables, gates = tables  # type: ignore[assignment]
        graph.gates = (gates,)
    h_TD = _attention_input(graph, x_TD, decoder)
    q_TN = _projected(graph, "q", h_TD, positions, tables, decoder)
    caches = _written_caches(graph, h_TD, positions, slots, tables, decoder, num_blocks, kv_cache_dtype)
    attended = _attended(graph, q_TN, caches, positions, sequence, block_table, decoder, kind)
    return _after_attention(graph, x_TD, attended, decoder)


@layer
def last_cached_layer(
    graph: GraphBuilder,
    x_TD: TensorNode,
    positions: TensorNode,
    slots: TensorNode,
    block_table: TensorNode,
    rows: TensorNode,
    row_positions: TensorNode,
    row_sequence: TensorNode,
    *tables: TensorNode,
    decoder: Decoder,
    kind: LayerKind,
    num_blocks: int,
    kv_cache_dtype: str,
    has_gates: bool = False,
) -> TensorNode:
    """The last layer: keys and values of all tokens, everything else only for the requested rows
    `[R]`. A row has the same values next to any other rows. With `has_gates`, the last operands are
    the gates of adapters for all tokens and for the rows.
    """
    if has_gates:
        *tables, gates_T, gates_R = tables  # type: ignore[assignment]
        graph.gates = gates_T, gates_R
    h_TD = _attention_input(graph, x_TD, decoder)
    q_RN = _projected(graph, "q", graph.gather_rows(h_TD, rows), row_positions, tables, decoder)
    caches = _written_caches(graph, h_TD, positions, slots, tables, decoder, num_blocks, kv_cache_dtype)
    attended = _attended(graph, q_RN, caches, row_positions, row_sequence, block_table, decoder, kind)
    return _after_attention(graph, graph.gather_rows(x_TD, rows), attended, decoder)


def _written_caches(
    graph: GraphBuilder,
    h: TensorNode,
    positions: TensorNode,
    slots: TensorNode,
    tables: tuple[TensorNode, ...],
    decoder: Decoder,
    num_blocks: int,
    kv_cache_dtype: str,
) -> tuple[TensorNode, TensorNode]:
    """Keys and values of all tokens, written into a layer's caches."""
    caches = []
    for name, spec in zip("kv", _caches(decoder, num_blocks, h.spec.dtype, kv_cache_dtype)):
        new = _projected(graph, name, h, positions, tables, decoder)
        cache = graph.state(spec.shape, spec.dtype, name=spec.name, labels=spec.labels)
        caches.append(graph.kv_write(cache, new, slots, head_dim=decoder.head_dim, block_size=BLOCK_SIZE))
    keys, values = caches
    return keys, values


def _attended(
    graph: GraphBuilder,
    q: TensorNode,
    caches: tuple[TensorNode, TensorNode],
    positions: TensorNode,
    sequence: TensorNode,
    block_table: TensorNode,
    decoder: Decoder,
    kind: LayerKind,
) -> TensorNode:
    """Attention of queries over the caches."""
    return graph.paged_attention(
        q,
        *caches,
        positions,
        sequence,
        block_table,
        head_dim=decoder.head_dim,
        block_size=BLOCK_SIZE,
        scale=decoder.attention_scale,
        window=kind.window,
        softcap=decoder.attention_softcap,
    )


def _embed(
    graph: GraphBuilder, decoder: Decoder, tokens: TensorNode, positions: TensorNode, dtype: str
) -> tuple[TensorNode, TensorNode]:
    """The stream before the first layer, and the embedding."""
    shape = [decoder.vocab_size, decoder.hidden_size]
    weight = graph.parameter(shape, dtype, name="embed_tokens.weight", labels=[VOCAB, None])
    x = graph.embedding(tokens, weight)
    scale = decoder.embedding_scale
    x = _scaled(graph, x, _rounded(scale, dtype) if decoder.rounds_embedding_scale else scale)
    if decoder.learned_positions:
        rows = [decoder.learned_positions, decoder.hidden_size]
        table = graph.parameter(rows, dtype, name="embed_positions.weight")
        x = graph.add(x, graph.embedding(positions, table))
    return x, weight


def _rounded(factor: float, dtype: str) -> float:
    """A factor, rounded to the dtype that it multiplies, as in transformers."""
    return float(np.asarray(factor, dtype_of(dtype).numpy))


def _head(graph: GraphBuilder, decoder: Decoder, x: TensorNode, embedding: TensorNode) -> TensorNode:
    if decoder.tied_head:
        logits = graph.matmul(x, embedding, trans_b=True)
    else:
        logits = linear(graph, x, "lm_head.weight", decoder.vocab_size, out_label=VOCAB)
    logits = _scaled(graph, logits, decoder.logits_scale)
    return logits if decoder.logits_softcap is None else graph.softcap(logits, decoder.logits_softcap)


def _table_name(rope: int) -> str:
    return f"rope_table{rope or ''}"


def _table_of(kind: LayerKind) -> tuple[str, ...]:
    """The RoPE table that layers of a kind read, if any."""
    return () if kind.rope is None else (_table_name(kind.rope),)


def _tables(graph: GraphBuilder, decoder: Decoder, num_positions: int, context: int) -> dict[str, TensorNode]:
    """The RoPE table of every rope."""
    return {
        name: graph.constant(rope_table(rope, decoder.head_dim, num_positions, context), name=name)
        for rope, name in zip(decoder.ropes, map(_table_name, range(len(decoder.ropes))))
    }


def training_parts(
    decoder: Decoder,
    batch: int,
    seq: Size,
    dtype: str = "bf16",
    *,
    preference: PreferenceLoss | None = None,
    has_documents: bool = False,
) -> ModelParts:
    """One training step, as `models.build_training_graph` describes it.

    Raises:
        ShapeError: `seq`, or its bound, exceeds the model's positions.
    """
    call = "build_training_graph"
    _validate.integer(call, "batch", batch, 1, MAX_SIZE)
    longest = upper_bound(seq) if isinstance(seq, Dim) else seq
    _validate.integer(call, "seq", longest, 1, decoder.max_positions)

    def before(graph: GraphBuilder) -> dict[str, TensorNode]:
        graph.prefer_k_splits(default_k_splits(decoder.num_heads, decoder.num_kv_heads))
        names = ("tokens", "labels", *(("positions", "first") if has_documents else ()))
        named = {
            name: graph.input([batch, seq], "i32", name=name, labels=[BATCH, None], storage="scalars")
            for name in names
        }
        tokens = named.pop("tokens")
        if not has_documents:
            named["positions"] = graph.positions(tokens)
        tables = _tables(graph, decoder, longest, longest)
        x, embedding = _embed(graph, decoder, tokens, named["positions"], dtype)
        return {STREAM: x, **named, "embedding": embedding, **tables}

    def layer_of(number: int) -> LayerUse:
        kind = decoder.layers[number]
        attrs: dict[str, object] = {"decoder": decoder, "kind": kind}
        operands = ("positions", *_table_of(kind))
        if has_documents:
            attrs["has_documents"], operands = True, (*operands, "first")
        return LayerUse(decoder_layer, f"layers.{number}", operands, attrs)

    def after(graph: GraphBuilder, x: TensorNode, named: Mapping[str, TensorNode]) -> None:
        logits = _head(graph, decoder, _norm(graph, x, "norm", decoder), named["embedding"])
        if preference is None:
            loss, rows = graph.mean_cross_entropy(logits, named["labels"])
            graph.output(rows, "loss_rows")
        else:
            loss, log_probs = preference_loss(graph, logits, named["labels"], preference)
            graph.output(log_probs, "log_probs")
        graph.loss(loss)

    return ModelParts(before, len(decoder.layers), layer_of, after)


def decoding_parts(
    decoder: Decoder,
    max_tokens: int,
    max_sequences: int,
    num_blocks: int,
    dtype: str = "bf16",
    *,
    context: int | None = None,
    num_positions: int | None = None,
    max_rows: int | None = None,
    with_head: bool = True,
    kv_cache_dtype: str = "auto",
    gates: tuple[int, int] | None = None,
) -> ModelParts:
    """Prefill and decoding, as `models.build_decoding_graph` describes them.

    Raises:
        ShapeError: a size that no graph has, a context beyond the model's, or a head size that a
            cache of int8 cannot have.
    """
    call = "build_decoding_graph"
    most_rows = max_sequences if max_rows is None else max_rows
    sizes = {"max_tokens": max_tokens, "max_sequences": max_sequences, "num_blocks": num_blocks}
    sizes["max_rows"] = most_rows
    for name, value in sizes.items():
        _validate.integer(call, name, value, 1, MAX_SIZE)
    context = decoder.default_context if context is None else context
    context = _validate.integer(call, "context", context, 1, decoder.max_positions)
    longest = context if num_positions is None else num_positions
    longest = _validate.integer(call, "num_positions", longest, 1, context)
    with_head = _validate.truth(call, "with_head", with_head)
    places, row_places = ("positions", "slots", "sequence"), ("row_positions", "row_sequence")

    def before(graph: GraphBuilder) -> dict[str, TensorNode]:
        graph.prefer_k_splits(default_k_splits(decoder.num_heads, decoder.num_kv_heads))
        T, S = Dim("tokens", 1, max_tokens), Dim("sequences", 1, max_sequences)
        tokens, *scalars = (graph.input([T], "i32", name=n, storage="scalars") for n in ("tokens", *places))
        max_blocks = min(num_blocks, -(-longest // BLOCK_SIZE))
        block_table = graph.input([S, max_blocks], "i32", name="block_table")
        rows = graph.input([Dim("rows", 1, most_rows)], "i32", name="rows", storage="scalars")
        tables = _tables(graph, decoder, longest, context)
        x, embedding = _embed(graph, decoder, tokens, scalars[0], dtype)
        named = {STREAM: x, "block_table": block_table, "rows": rows, "embedding": embedding}
        positions, _, sequence = scalars
        of_rows = (graph.gather_rows(x, rows) for x in (positions, sequence))
        named |= {**dict(zip(places, scalars)), **dict(zip(row_places, of_rows)), **tables}
        if gates is not None:
            adapter = graph.input([T], "i32", name="adapter", storage="scalars")
            table = graph.parameter(list(gates), dtype, name=GATES, trainable=False)
            named["gates"] = graph.embedding(adapter, table)
            named["row_gates"] = graph.embedding(graph.gather_rows(adapter, rows), table)
        return named

    def layer_of(number: int) -> LayerUse:
        kind = decoder.layers[number]
        cache = {"num_blocks": num_blocks, "kv_cache_dtype": kv_cache_dtype}
        attrs = {"decoder": decoder, "kind": kind, **cache}
        path, tables, row_gates = f"layers.{number}", _table_of(kind), tuple[str, ...]()
        if gates is not None:
            attrs["has_gates"] = True
            tables, row_gates = (*tables, "gates"), ("row_gates",)
        if number + 1 < len(decoder.layers):
            return LayerUse(cached_layer, path, (*places, "block_table", *tables), attrs)
        operands = ("positions", "slots", "block_table", "rows", *row_places, *tables, *row_gates)
        return LayerUse(last_cached_layer, path, operands, attrs)

    def caches(number: int) -> tuple[TensorSpec, ...]:
        specs = _caches(decoder, num_blocks, dtype, kv_cache_dtype)
        return tuple(spec.renamed(f"layers.{number}.{spec.name}") for spec in specs)

    def after(graph: GraphBuilder, x: TensorNode, named: Mapping[str, TensorNode]) -> None:
        x = _norm(graph, x, "norm", decoder)
        if gates is not None:
            graph.gates = (named["row_gates"],)
        if with_head:
            graph.output(_head(graph, decoder, x, named["embedding"]), "logits")
        else:
            graph.output(x, "hidden")

    return ModelParts(before, len(decoder.layers), layer_of, after, caches)
