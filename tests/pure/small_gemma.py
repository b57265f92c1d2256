"""A small Gemma 3, whose layers are of two kinds: shared by tests over several templates."""

from __future__ import annotations

from tilewise.models.gemma3 import Gemma3Config

GEMMA = Gemma3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=8,
    layer_types=("sliding_attention", "full_attention") * 2,
)
