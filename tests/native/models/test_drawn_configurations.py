"""Random configurations of every family: logits as in transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.models.families import MULTIPLIERS, Case, ids_of, our_logits, their_logits
from tilewise import models

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2", "granite"),
    "gpt2",
)
ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24, "attention_factor": 1.2},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0,
        "beta_fast": 0,
        "beta_slow": 0.0,
    },
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 32,
    },
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any family with its possible sizes, head groups, windows, RoPE and biases."""
    family = draw(st.sampled_from(FAMILIES))
    layers = draw(st.integers(1, 3))
    tied = draw(st.booleans())
    vocab = draw(st.integers(33, 150))
    heads = draw(st.integers(1, 6))
    if family == "gpt2":
        changes: dict[str, Any] = {
            "n_layer": layers,
            "n_head": heads,
            "n_embd": heads * draw(st.integers(2, 9)) * 2,
        }
        changes |= {"vocab_size": vocab, "n_inner": draw(st.sampled_from([None, 50]))}
        changes |= {"activation_function": draw(st.sampled_from(["gelu_new", "gelu", "silu"]))}
        return Case("drawn", family, changes)
    kv = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    head_dim = 2 * draw(st.integers(2, 12))
    hidden = (
        heads * head_dim if family in ("phi3", "gemma2", "gemma3") else 2 * heads * draw(st.integers(3, 12))
    )
    changes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(5, 90)),
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
    }
    scaling, theta = draw(st.sampled_from(ROPES)), draw(st.sampled_from([100.0, 10000.0, 1e6]))
    if family not in ("gemma3", "phi3"):
        if scaling is not None and scaling["rope_type"] == "dynamic":
            changes["max_position_embeddings"] = draw(st.sampled_from([16, 64]))
        changes["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    window = draw(st.integers(1, 40))
    if family in ("mistral", "phi3"):
        changes["sliding_window"] = draw(st.sampled_from([None, window]))
    if family in ("qwen2", "qwen3"):
        changes |= {"use_sliding_window": draw(st.booleans()), "sliding_window": window}
        changes["max_window_layers"] = draw(st.integers(0, 3))
    if family in ("gemma2", "gemma3"):
        changes |= {"sliding_window": window, "query_pre_attn_scalar": draw(st.integers(1, 60))}
        changes["hidden_activation"] = draw(st.sampled_from(["gelu_pytorch_tanh", "gelu", "silu"]))
    if family in ("llama", "qwen3", "smollm3", "olmo2", "granite"):
        changes["attention_bias"] = draw(st.booleans())
    if family in ("smollm3", "granite"):
        changes["mlp_bias"] = draw(st.booleans())
    if family == "phi3":
        rotated = 2 * draw(st.integers(1, head_dim // 2))
        share = min(1.0, (rotated + 0.5) / head_dim)
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        changes["rope_parameters"]["partial_rotary_factor"] = share
    if family == "smollm3":
        flags = draw(st.none() | st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
        changes |= {"no_rope_layers": flags, "no_rope_layer_interval": draw(st.integers(1, 4))}
        changes |= {"use_sliding_window": draw(st.booleans()), "sliding_window": window}
    if family == "granite":
        changes |= {name: draw(st.floats(0.1, 4)) for name in MULTIPLIERS}
    return Case("drawn", family, changes)


def assert_alike(case: Case) -> None:
    """fp32 logits of a text within 1e-4 of the largest."""
    with tempfile.TemporaryDirectory() as directory:
        model = case.model()
        model.save_pretrained(directory)
        vocab = models.open(directory).vocab_size
        ids = ids_of(37, vocab)
        ours, theirs = our_logits(Path(directory), ids), their_logits(model, ids)
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@settings(max_examples=12)
@given(cases())
def test_drawn_configurations(case):
    """A dozen configurations in everyday runs."""
    assert_alike(case)


@pytest.mark.slow
@settings(max_examples=250)
@given(cases())
def test_many_drawn_configurations(case):
    """More configurations."""
    assert_alike(case)
