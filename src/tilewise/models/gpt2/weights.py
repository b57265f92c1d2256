"""The names of GPT-2's parameters in files: projections are `[in, out]` (`Conv1D`), and queries,
keys and values are one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.checkpoint import StoredTensor
from tilewise.models.decoder.architecture import Decoder

__all__ = ["DERIVED", "stored_conv"]

DERIVED = r"h\.[0-9]+\.attn\.(bias|masked_bias)"  # causal masks that older files hold


def stored_conv(decoder: Decoder) -> Iterator[StoredTensor]:
    """Every tensor of a file, with the parameters that are adjacent in it."""
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    yield StoredTensor("transformer.wte.weight", (("embed_tokens.weight", decoder.vocab_size),))
    yield StoredTensor("transformer.wpe.weight", (("embed_positions.weight", decoder.learned_positions),))
    projections = (
        ("attn.c_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), hidden),
        ("attn.c_proj", ("self_attn.o_proj",), hidden),
        ("mlp.c_fc", ("mlp.up_proj",), inner),
        ("mlp.c_proj", ("mlp.down_proj",), hidden),
    )
    for i in range(len(decoder.layers)):
        for stored, norm in (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")):
            yield from _norm(f"transformer.h.{i}.{stored}", f"layers.{i}.{norm}", hidden)
        for stored, parts, size in projections:
            for kind in ("weight", "bias"):
                parameters = tuple((f"layers.{i}.{part}.{kind}", size) for part in parts)
                yield StoredTensor(
                    f"transformer.h.{i}.{stored}.{kind}", parameters, is_transposed=kind == "weight"
                )
    yield from _norm("transformer.ln_f", "norm", hidden)
    if not decoder.tied_head:
        yield StoredTensor("lm_head.weight", (("lm_head.weight", decoder.vocab_size),))


def _norm(stored: str, name: str, hidden: int) -> Iterator[StoredTensor]:
    for kind in ("weight", "bias"):
        yield StoredTensor(f"{stored}.{kind}", ((f"{name}.{kind}", hidden),))
