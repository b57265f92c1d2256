"""Llama as a graph: one layer template, used by training and by generation.

Shapes: B batch, S sequence, T flattened tokens, D hidden, N heads x head size, K KV heads x head size, F MLP,
V vocabulary. The model knows no devices; the labels of its dims (`models/llama/sharding.py`) say what may be shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewise.core.border import Border
from tilewise.core.dims import MAX_SIZE, Dim, Size, upper_bound
from tilewise.core.errors import ShapeError
from tilewise.ir.graph import TensorNode
from tilewise.models.llama.config import LlamaConfig
from tilewise.models.llama.sharding import BATCH, MLP, VOCAB, heads_label, kv_heads_label
from tilewise.nn import GraphBuilder, layer, linear, rms_norm

__all__ = ["BLOCK_SIZE", "build_decoding_graph", "build_training_graph", "rope_table"]

BLOCK_SIZE = 64
_border = Border("models", ShapeError)


def rope_table(config: LlamaConfig) -> np.ndarray:
    """Cosines and sines `[max_position_embeddings, head_dim]` fp32: the first half cosines, the second sines.

    Source: Su et al. 2021; the `llama3` scaling as in the Llama 3.1 release.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    if config.rope_scaling:
        frequency = _llama3_frequencies(frequency, config.rope_scaling)
    # PyTorch computes frequencies, angles and their cosines in fp32; so do we, to write the same text
    frequency = frequency.astype(np.float32)
    angles = np.arange(config.max_position_embeddings, dtype=np.float32)[:, None] * frequency[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _llama3_frequencies(frequency: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = np.clip((old / wavelength - low) / (high - low), 0.0, 1.0)
    blended = (1 - smooth) * frequency / factor + smooth * frequency
    scaled = np.where(wavelength > old / low, frequency / factor, blended)
    return np.where(wavelength < old / high, frequency, scaled)


def _qkv(graph: GraphBuilder, h: TensorNode, config: LlamaConfig) -> list[TensorNode]:
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return [
        linear(graph, h, "self_attn.q_proj.weight", heads, out_label=heads_label(config)),
        linear(graph, h, "self_attn.k_proj.weight", kv, out_label=kv_heads_label(config)),
        linear(graph, h, "self_attn.v_proj.weight", kv, out_label=kv_heads_label(config)),
    ]


def _norm(graph: GraphBuilder, x: TensorNode, name: str, config: LlamaConfig) -> TensorNode:
    return rms_norm(graph, x, f"{name}.weight", eps=config.rms_norm_eps)


def _after_attention(
    graph: GraphBuilder, x: TensorNode, attended: TensorNode, config: LlamaConfig
) -> TensorNode:
    """Output projection, MLP, and the two residuals."""
    d, f = config.hidden_size, config.intermediate_size
    scale = (
        2 * config.num_hidden_layers
    ) ** -0.5  # so many sums spread as far as one: GPT-2's initialisation
    attended = linear(
        graph, attended, "self_attn.o_proj.weight", d, in_label=heads_label(config), init_scale=scale
    )
    x = graph.add(x, attended)
    h = _norm(graph, x, "post_attention_layernorm", config)
    gate = linear(graph, h, "mlp.gate_proj.weight", f, out_label=MLP)
    up = linear(graph, h, "mlp.up_proj.weight", f, out_label=MLP)
    gated = graph.multiply(graph.silu(gate), up)
    return graph.add(x, linear(graph, gated, "mlp.down_proj.weight", d, in_label=MLP, init_scale=scale))


@layer
def decoder_layer(
    graph: GraphBuilder, x_BSD: TensorNode, positions: TensorNode, table: TensorNode, *, config: LlamaConfig
) -> TensorNode:
    """One layer over whole sequences `[B, S, D]`."""
    h = _norm(graph, x_BSD, "input_layernorm", config)
    q_BSN, k_BSK, v_BSK = _qkv(graph, h, config)
    q_BSN = graph.rope(q_BSN, positions, table, head_dim=config.head_dim)
    k_BSK = graph.rope(k_BSK, positions, table, head_dim=config.head_dim)
    attended = graph.scaled_dot_product_attention(q_BSN, k_BSK, v_BSK, head_dim=config.head_dim)
    return _after_attention(graph, x_BSD, attended, config)


@layer
def cached_layer(
    graph: GraphBuilder,
    x_TD: TensorNode,
    positions: TensorNode,
    slots: TensorNode,
    sequence: TensorNode,
    block_table: TensorNode,
    table: TensorNode,
    *,
    config: LlamaConfig,
    num_blocks: int,
) -> TensorNode:
    """One layer over flattened tokens `[T, D]` and a KV cache in blocks."""
    h = _norm(graph, x_TD, "input_layernorm", config)
    q_TN, k_TK, v_TK = _qkv(graph, h, config)
    q_TN = graph.rope(q_TN, positions, table, head_dim=config.head_dim)
    k_TK = graph.rope(k_TK, positions, table, head_dim=config.head_dim)
    shape, labels = (
        [num_blocks * BLOCK_SIZE, config.num_key_value_heads * config.head_dim],
        [None, kv_heads_label(config)],
    )
    caches = []
    for name, new in (("k_cache", k_TK), ("v_cache", v_TK)):
        cache = graph.state(shape, x_TD.spec.dtype, name=f"self_attn.{name}", labels=labels)
        caches.append(graph.kv_write(cache, new, slots))
    attended = graph.paged_attention(
        q_TN,
        caches[0],
        caches[1],
        positions,
        sequence,
        block_table,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
    )
    return _after_attention(graph, x_TD, attended, config)


def _embed(
    graph: GraphBuilder, config: LlamaConfig, tokens: TensorNode, dtype: str
) -> tuple[TensorNode, TensorNode]:
    shape = [config.vocab_size, config.hidden_size]
    weight = graph.parameter(shape, dtype, name="embed_tokens.weight", labels=[VOCAB, None])
    return graph.embedding(tokens, weight), weight


def _head(graph: GraphBuilder, config: LlamaConfig, x: TensorNode, embedding: TensorNode) -> TensorNode:
    if config.tie_word_embeddings:
        return graph.matmul(x, embedding, transpose_b=True)
    return linear(graph, x, "lm_head.weight", config.vocab_size, out_label=VOCAB)


def build_training_graph(
    graph: GraphBuilder, config: LlamaConfig, batch: int, seq: Size, dtype: str = "bf16"
) -> None:
    """Describe one training step in an empty graph.

    Args:
        graph: written to.
        config: the model.
        batch: sequences per step, over all devices and microbatches.
        seq: tokens per sequence; a `Dim("seq", 1, 512)` for batches of any length up to its bound, whose shorter
            sequences end in padding: any token, with a label that is not counted.
        dtype: of weights and activations, `bf16` or `f32`; sums, gradients and optimizer state are fp32.

    Inputs: tokens and labels `[B, S]` i32 (-100 is not counted). Outputs: loss `[1]`, loss_rows `[B, S]`.

    Raises:
        ShapeError: `seq`, or its bound, exceeds the model's positions.
    """
    _check("build_training_graph", graph, config)
    _border.integer("build_training_graph", "batch", batch, 1, MAX_SIZE)
    longest = upper_bound(seq) if isinstance(seq, Dim) else seq
    _border.integer("build_training_graph", "seq", longest, 1, config.max_position_embeddings)
    with graph.all_or_nothing():
        _describe_training(graph, config, batch, seq, dtype)


def _check(call: str, graph: GraphBuilder, config: LlamaConfig) -> None:
    _border.instance(call, "the first argument", graph, GraphBuilder, "pass the graph")
    _border.instance(call, "config", config, LlamaConfig, "pass a LlamaConfig")


def _describe_training(graph: GraphBuilder, config: LlamaConfig, batch: int, seq: Size, dtype: str) -> None:
    tokens = graph.input([batch, seq], "i32", name="tokens", labels=[BATCH, None], storage="scalars")
    labels = graph.input([batch, seq], "i32", name="labels", labels=[BATCH, None], storage="scalars")
    positions = graph.positions(tokens)
    table = graph.constant(rope_table(config), name="rope_table")
    x, embedding = _embed(graph, config, tokens, dtype)
    for i in range(config.num_hidden_layers):
        x = decoder_layer(graph, x, positions, table, path=f"layers.{i}", config=config)
    logits = _head(graph, config, _norm(graph, x, "norm", config), embedding)
    loss, rows = graph.mean_cross_entropy(logits, labels)
    graph.output(rows, "loss_rows")
    graph.loss(loss)


def build_decoding_graph(
    graph: GraphBuilder,
    config: LlamaConfig,
    max_tokens: int,
    max_sequences: int,
    num_blocks: int,
    dtype: str = "bf16",
) -> None:
    """Describe prefill and decoding over flattened tokens in an empty graph.

    Args:
        graph: written to.
        config: the model.
        max_tokens: largest number of tokens in one call.
        max_sequences: largest number of rows of the block table, and of rows that want logits.
        num_blocks: KV blocks of 64 positions.
        dtype: of weights, activations and cache.

    Inputs, all i32: tokens, positions, slots, sequence `[T]`; block_table `[S, blocks]`; rows `[S]`.
    Output: logits `[S, V]`.
    """
    _check("build_decoding_graph", graph, config)
    for name, value in (
        ("max_tokens", max_tokens),
        ("max_sequences", max_sequences),
        ("num_blocks", num_blocks),
    ):
        _border.integer("build_decoding_graph", name, value, 1, MAX_SIZE)
    with graph.all_or_nothing():
        _describe_decoding(graph, config, max_tokens, max_sequences, num_blocks, dtype)


def _describe_decoding(
    graph: GraphBuilder, config: LlamaConfig, max_tokens: int, max_sequences: int, num_blocks: int, dtype: str
) -> None:
    T, S = Dim("tokens", 1, max_tokens), Dim("sequences", 1, max_sequences)
    max_blocks = min(num_blocks, -(-config.max_position_embeddings // BLOCK_SIZE))
    per_token = {
        n: graph.input([T], "i32", name=n, storage="scalars")
        for n in ("tokens", "positions", "slots", "sequence")
    }
    block_table = graph.input([S, max_blocks], "i32", name="block_table")
    rows = graph.input([S], "i32", name="rows", storage="scalars")
    table = graph.constant(rope_table(config), name="rope_table")
    x, embedding = _embed(graph, config, per_token["tokens"], dtype)
    for i in range(config.num_hidden_layers):
        x = cached_layer(
            graph,
            x,
            per_token["positions"],
            per_token["slots"],
            per_token["sequence"],
            block_table,
            table,
            path=f"layers.{i}",
            config=config,
            num_blocks=num_blocks,
        )
    picked = graph.gather_rows(_norm(graph, x, "norm", config), rows)
    graph.output(_head(graph, config, picked, embedding), "logits")
