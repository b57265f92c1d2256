"""Names and shapes of a decoder's parameters in graphs, and the table that maps them to files of
most families.

A graph has `layers.3.mlp.up_proj.weight`, a file has `model.layers.3.mlp.up_proj.weight`; only
`lm_head.weight` is the same. Families with other files (fused projections, other names) have their
own table in `weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.checkpoint import StoredTensor
from tilewise.models.decoder.architecture import Decoder

__all__ = ["HEAD", "parameter_shapes", "stored_by_name", "stored_parameter"]

HEAD = "lm_head.weight"


def parameter_shapes(decoder: Decoder) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter's name in the graph and its shape `[out, in]`, in the order of the forward pass.

    A tied head has no entry of its own.
    """
    hidden, q, kv = decoder.hidden_size, decoder.q_size, decoder.kv_size
    yield "embed_tokens.weight", (decoder.vocab_size, hidden)
    if decoder.learned_positions:
        yield "embed_positions.weight", (decoder.learned_positions, hidden)
    for i in range(len(decoder.layers)):
        for name, shape in _layer_shapes(decoder, hidden, q, kv):
            yield f"layers.{i}.{name}", shape
    yield from _norm_shapes("norm", hidden, decoder)
    if not decoder.tied_head:
        yield HEAD, (decoder.vocab_size, hidden)


def _layer_shapes(decoder: Decoder, hidden: int, q: int, kv: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = decoder.intermediate_size
    if decoder.norms_before:
        yield from _norm_shapes("input_layernorm", hidden, decoder)
    for name, size in (("q", q), ("k", kv), ("v", kv)):
        yield from _linear_shapes(f"self_attn.{name}_proj", size, hidden, decoder.qkv_bias)
    if decoder.qk_norm is not None:
        for name, size in (("q", q), ("k", kv)):
            yield f"self_attn.{name}_norm.weight", (decoder.head_dim if decoder.qk_norm == "head" else size,)
    yield from _linear_shapes("self_attn.o_proj", hidden, q, decoder.out_bias)
    yield from _norm_shapes("post_attention_layernorm", hidden, decoder)
    if decoder.norms_before and decoder.norms_after:
        yield from _norm_shapes("pre_feedforward_layernorm", hidden, decoder)
    for name in ("gate", "up") if decoder.gated else ("up",):
        yield from _linear_shapes(f"mlp.{name}_proj", inner, hidden, decoder.mlp_bias)
    yield from _linear_shapes("mlp.down_proj", hidden, inner, decoder.mlp_bias)
    if decoder.norms_after:
        yield from _norm_shapes("post_feedforward_layernorm", hidden, decoder)


def _linear_shapes(name: str, out: int, inner: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, inner)
    if bias:
        yield f"{name}.bias", (out,)


def _norm_shapes(name: str, hidden: int, decoder: Decoder) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (hidden,)
    if decoder.norm == "layer":
        yield f"{name}.bias", (hidden,)


def stored_parameter(name: str) -> str:
    """The name in files of a parameter that they hold as the graph does."""
    return name if name == HEAD else f"model.{name}"


def stored_by_name(decoder: Decoder) -> Iterator[StoredTensor]:
    """One tensor in a file per parameter, as Llama's files have them."""
    for name, shape in parameter_shapes(decoder):
        yield StoredTensor(stored_parameter(name), ((name, shape[0]),))
