"""A small model of every family, with sizes that no width divides: shared by the tests that compare strategies."""

from __future__ import annotations

from typing import Any

import numpy as np
import small_llama

from tilewise import models
from tilewise.models import ModelConfig

SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 3.0]}
MULTIPLIERS = {"embedding_multiplier": 6.3, "attention_multiplier": 0.3, "residual_multiplier": 0.22}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 10, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 10, "sliding_window": 6},
    "gemma3_text": {"head_dim": 10, "sliding_window": 6, "sliding_window_pattern": 2},
    "phi3": {
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "granite": {**MULTIPLIERS, "logits_scaling": 3.0},
    "gpt2": {"vocab_size": 199, "n_embd": 48, "n_layer": 2, "n_head": 8, "n_positions": 64},
    "bert": {**SIZES, "num_key_value_heads": None},
}


def small(family: str) -> ModelConfig:
    """Eight query heads, two KV heads where the family groups them, a vocabulary of 199."""
    sizes = {} if family == "gpt2" else SIZES
    fields = {"model_type": family, **sizes, **FAMILIES[family]}
    return models.config_from_dict({k: v for k, v in fields.items() if v is not None})


def batches(config: ModelConfig, steps: int, batch: int, seq: int) -> list[dict[str, np.ndarray]]:
    """Random tokens; some labels are not counted. Encoders' texts have their own lengths."""
    result = [dict(inputs) for inputs in small_llama.batches(config, steps, batch, seq)]
    generator = np.random.default_rng(7)
    for inputs in result if models.is_encoder(config) else ():
        inputs["lengths"] = generator.integers(1, seq, batch, endpoint=True).astype(np.int32)
        inputs["token_types"] = generator.integers(0, 2, (batch, seq)).astype(np.int32)
    return result
