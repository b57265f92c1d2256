"""Writes models of transformers as GGUF files, as llama.cpp's converter does, with the gguf package.

Nothing here uses the product's reader: names of tensors, quantisation and dequantisation are the
gguf package's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
_HALVES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
_HALVES |= {Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,)}
_PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}
Array = np.ndarray


class _Tensor:
    """An array with the methods of a tensor of PyTorch that `write_model` calls."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array, np.float32)

    def float(self) -> _Tensor:
        return self

    def numpy(self) -> Array:
        return self._array


def small_model(model_type: str, **changes: Any) -> Any:
    """A model with random weights for `write_model`, without PyTorch: its `config`, and a `state_dict`."""
    from tilewise import models

    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    if model_type.startswith("gemma"):
        sizes |= {"sliding_window": 8, "query_pre_attn_scalar": 32}
    if model_type == "gemma2":
        sizes |= {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
    sizes |= {"model_type": model_type, **changes}
    if model_type == "gemma3_text":
        sizes["layer_types"] = ["sliding_attention"] * sizes["num_hidden_layers"]
    config = models.config_from_dict(sizes)
    rng = np.random.default_rng(0)
    parameters = {
        name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in models.parameter_shapes(config)
    }
    state = {name: _Tensor(tensor) for name, tensor in models.stored_tensors(config, parameters)}
    if model_type == "gemma3_text":
        sizes["rope_parameters"] = {"full_attention": sizes["rope_parameters"]}
    described = {**{"sliding_window": None, "original_max_position_embeddings": 64}, **sizes}
    return SimpleNamespace(config=SimpleNamespace(**described), state_dict=lambda: state)


def blocks_of(values: Array, kind: Kind, seed: int = 0) -> Array:
    """A matrix in a format: quantised where the gguf package can, otherwise random blocks of small numbers."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(seed)
        blocks = rng.integers(0, 256, (values.size // elements, num_bytes), np.uint8)
        for at in _HALVES.get(kind, ()):
            scales = rng.uniform(1e-4, 4e-4, (len(blocks), 1)).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8)
        if kind == Kind.MXFP4:
            blocks[:, 0] = 122
        return blocks.reshape(values.shape[0], -1)


def write_model(
    path: Path,
    model: Any,
    kind_of: Callable[[str, Array], Kind],
    *,
    vocabulary: Mapping[str, Any] | None = None,
    max_tensors: int = 0,
) -> dict[str, Array]:
    """Write a model.

    Args:
        path: the file; with `max_tensors`, parts get their usual names.
        model: a causal model of transformers.
        kind_of: the type of a tensor, by its name in transformers and its values.
        vocabulary: key-values of the tokenizer.
        max_tensors: of a part; 0 for one file.

    Returns:
        The weights in bf16 that the file means, by their names in transformers.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    add_sizes(writer, config)
    add_values(writer, vocabulary or {})
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, factors in ({} if architecture in ("gpt2", "bert") else rope_factors(config)).items():
        writer.add_tensor(name, factors)
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    expected = {}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.float().numpy()
        is_transposed = architecture == "gpt2" and ".h." in name and values.ndim == 2
        values = np.ascontiguousarray(values.T) if is_transposed else values
        is_permuted = architecture in ("llama", "smollm3", "granite") and "proj" in name
        moved = next((n for part, n in heads.items() if part in name), 0) if is_permuted else 0
        if moved:
            values = values.reshape(moved, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        is_shifted = architecture.startswith("gemma") and name.endswith("norm.weight")
        if is_shifted:
            values = values + np.float32(1)
        kind = kind_of(name, values) if values.ndim > 1 else Kind.F32
        stored = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if kind in _PLAIN:
            data = values.astype(_PLAIN[kind])
            raw = data.view(np.uint8) if kind == Kind.BF16 else data
            writer.add_tensor(stored, raw, raw_dtype=kind if kind == Kind.BF16 else None)
            meant = data.astype(np.float32)
        else:
            data = blocks_of(values, kind, len(expected))
            writer.add_tensor(stored, data, raw_dtype=kind)
            meant = gguf.dequantize(data, kind).reshape(values.shape)
        if is_shifted:
            meant = meant - np.float32(1)
        if moved:
            meant = meant.reshape(moved, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        expected[name] = (meant.T if is_transposed else meant).astype(ml_dtypes.bfloat16)
    finish(writer)
    return expected


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything and close."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_values(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    """Key-values of any type that Python has."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the converter writes of config.json."""
    if config.model_type in ("gpt2", "bert"):
        add_sizes_without_rope(writer, config)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotated = config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * rotated))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "finetuned" in rope:
            writer.add_rope_scaling_finetuned(rope["finetuned"])
    if config.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        if kind == "longrope" and scale > 1:
            original = config.original_max_position_embeddings
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window_pattern([kind != "full_attention" for kind in config.layer_types])


def add_sizes_without_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    """The same for GPT-2 and BERT."""
    is_bert = config.model_type == "bert"
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(
        config.intermediate_size if is_bert else config.n_inner or 4 * config.n_embd
    )
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps if is_bert else config.layer_norm_epsilon)
    if is_bert:
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.CLS)


def rope_factors(config: Any) -> dict[str, Array]:
    """Tensors with what frequencies are divided by."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        both = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {f"rope_factors_{name}.weight": np.array(f, np.float32) for name, f in both.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, config.head_dim, 2):
        length = 2 * math.pi * np.float32(rope["rope_theta"]) ** np.float32(i / config.head_dim)
        smooth = min(max((original / length - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def byte_level_vocabulary(tokenizer: Any, pre: str, special: Sequence[str] = ()) -> dict[str, Any]:
    """The key-values of a byte-level `tokenizers.Tokenizer`, whose tokens `special` are control tokens."""
    content = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = content["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
    }


def piece_vocabulary(pieces: Sequence[tuple[str, float, int]]) -> dict[str, Any]:
    """The key-values of a SentencePiece tokenizer.

    Args:
        pieces: text, score and type (as in GGUF) of every token; the first three are unknown, and the
            beginning and end of texts.
    """
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [text for text, _, _ in pieces],
        "tokenizer.ggml.scores": [float(score) for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def short_pieces() -> list[tuple[str, float, int]]:
    """A SentencePiece vocabulary of all bytes and a few words."""
    named = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    named += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ("he", "ll", "\u2581he", "\u2581hello", "llo", "\u2581", "h", "e", "l", "o", "\u2581o")
    return [*named, *((word, -float(i), 1) for i, word in enumerate(words))]
