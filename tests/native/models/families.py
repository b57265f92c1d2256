"""Small seeded models of every family, written with transformers, and the results of both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import tilewise as tw
from tilewise import models
from tilewise.checkpoint import formats_of
from tilewise.models import ModelConfig

Array = np.ndarray
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "finetuned": True,  # as in Yarn-Llama-2's files
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}
_GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 256, "vocab_size": 131}
_NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# as in Phi-4-mini: the first 12 of 16 elements of a head are rotated
PARTIAL = {
    "partial_rotary_factor": 0.75,
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 12.0],
}
_GEMMA = {"query_pre_attn_scalar": 20, "sliding_window": 9}
MULTIPLIERS = {
    "embedding_multiplier": 2.3,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
_PHI3 = {"num_attention_heads": 3, "num_key_value_heads": 1}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
}


@dataclass(frozen=True)
class Case:
    """A small model: its family, and its differences from `SIZES`."""

    name: str
    family: str
    changes: Mapping[str, Any]

    def config(self, **more: Any) -> Any:
        """The configuration for transformers."""
        of, _ = _CLASSES[self.family]
        base = (
            {**_GPT2, **_NONE}
            if self.family == "gpt2"
            else {**SIZES, **(_GEMMA if "gemma" in self.family else {})}
        )
        return of(**deepcopy({**base, **self.changes, **more}))  # which it writes to

    def model(self, seed: int = 1, **more: Any) -> Any:
        """Made by transformers, with weights so large that the top two logits differ clearly."""
        torch.manual_seed(seed)
        model = _CLASSES[self.family][1](self.config(**more)).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim == 2:
                    p.normal_(0, 1.0 if "embed" in name or "wte" in name else 0.2)
                elif name.endswith("bias"):
                    p.normal_(0, 0.3)
                else:
                    p.add_(torch.randn_like(p) * 0.2)
        return model


CASES = [
    Case("llama", "llama", {}),
    Case(
        "llama-biases-tied", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    Case("llama-linear", "llama", {"rope_parameters": LINEAR}),
    Case("llama-llama3", "llama", {"rope_parameters": LLAMA3}),
    Case("llama-yarn", "llama", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    Case("mistral-window", "mistral", {"sliding_window": 7}),
    Case(
        "mistral-no-window",
        "mistral",
        {"sliding_window": None, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    Case("qwen2", "qwen2", {}),
    Case("qwen2-windows", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    Case("qwen3", "qwen3", {"tie_word_embeddings": True}),
    Case("qwen3-biases", "qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    Case("gemma2", "gemma2", {}),
    Case(
        "gemma3",
        "gemma3",
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    Case("phi3", "phi3", _PHI3),
    Case(
        "phi3-longrope",
        "phi3",
        {**_PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": 24},
    ),
    Case(
        "phi3-partial",
        "phi3",
        {
            **_PHI3,
            "rope_parameters": PARTIAL,
            "original_max_position_embeddings": 24,
            "tie_word_embeddings": True,
        },
    ),
    Case("smollm3", "smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    Case("olmo2", "olmo2", {}),
    Case("granite", "granite", MULTIPLIERS),
    Case("gpt2", "gpt2", {}),
    Case("gpt2-relu", "gpt2", {"activation_function": "relu"}),
]


def ids_of(count: int, vocab_size: int = 131, seed: int = 3) -> list[int]:
    """Random tokens."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab_size, count)]


def their_logits(model: Any, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> Array:
    """Logits `[T, V]` of transformers."""
    with torch.no_grad():
        return model.to(dtype)(torch.tensor([list(ids)])).logits[0].float().numpy()


def decoding_inputs(ids: Sequence[int], max_blocks: int) -> dict[str, Array]:
    """One call that reads a whole text and computes logits of all tokens."""
    places = np.arange(len(ids), dtype=np.int32)
    return {
        "tokens": np.array(ids, np.int32),
        "positions": places,
        "slots": places,
        "sequence": np.zeros(len(ids), np.int32),
        "block_table": np.tile(np.arange(max_blocks, dtype=np.int32), (len(ids), 1)),
        "rows": places,
    }


def our_logits(
    directory: Path,
    ids: Sequence[int],
    dtype: str = "f32",
    mesh: Mapping[str, int] | None = None,
    *,
    calls: Sequence[int] = (),
) -> Array:
    """Logits `[T, V]`; the context limit is the text's length. Quantised weights stay quantised in
    bf16. `calls` are the numbers of tokens of several calls; by default one call has them all.
    """
    config = models.open(directory)
    weights = models.open_weights(directory, config)
    count = len(ids)
    blocks = -(-count // models.BLOCK_SIZE)
    graph = tw.ComputeGraph(config.model_type, formats=formats_of(weights) if dtype == "bf16" else {})
    models.build_decoding_graph(graph, config, count, count, blocks, dtype, context=count)
    with graph.instantiate(graph.plan(mesh or {"tp": 1})) as instance:
        instance.load_parameters(weights)
        logits, whole = [], decoding_inputs(ids, blocks)
        ends = np.cumsum(calls or [count])
        assert ends[-1] == count
        for begin, end in zip([0, *ends], ends):
            part = {name: value[begin:end] for name, value in whole.items()}
            instance.forward(**{**part, "rows": whole["rows"][: end - begin]})
            logits.append(np.array(instance.get_tensor("logits"), np.float32))
        return np.concatenate(logits)


def training_graph(config: ModelConfig, batch: int, seq: int, dtype: str = "f32") -> tw.ComputeGraph:
    """A training graph without an optimizer."""
    graph = tw.ComputeGraph(config.model_type)
    models.build_training_graph(graph, config, batch, seq, dtype)
    return graph


def batch_of(config: ModelConfig, batch: int, seq: int, seed: int = 5) -> dict[str, Array]:
    """Random tokens; some labels are ignored."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, config.vocab_size, (batch, seq + 1)).astype(np.int32)
    labels = np.where(generator.random((batch, seq)) < 0.1, -100, ids[:, 1:]).astype(np.int32)
    return {"tokens": ids[:, :-1], "labels": labels}
