"""Prints the table of docs/models.md with the sizes of published models."""

from __future__ import annotations

from typing import Any

from tilewise import models
from tilewise.formats import weight_format
from tilewise.models.footprint import Footprint, footprint

GB = 10**9
MEMORIES, BANDWIDTHS = (16, 64), (20, 100)  # GB, GB/s
# bits of matrices: bf16, int8, int4
FORMATS = (16.0, weight_format("q8_0").bits, weight_format("q4_0").bits)


def _rotary(
    kind: str, vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": context,
        **more,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, **sizes}


TIED = {"tie_word_embeddings": True}
QWEN = {"head_dim": 128}
# family, model, and the sizes in its config.json: vocabulary, width, MLP, layers, query heads, KV heads, context
MODELS = (
    ("Llama", "TinyLlama 1.1B", _rotary("llama", 32000, 2048, 5632, 22, 32, 4, 2048)),
    ("Llama", "SmolLM2 135M", _rotary("llama", 49152, 576, 1536, 30, 9, 3, 8192, **TIED)),
    ("Llama", "SmolLM2 1.7B", _rotary("llama", 49152, 2048, 8192, 24, 32, 32, 8192, **TIED)),
    ("Llama", "Llama 2 7B", _rotary("llama", 32000, 4096, 11008, 32, 32, 32, 4096)),
    ("Llama", "Llama 2 13B", _rotary("llama", 32000, 5120, 13824, 40, 40, 40, 4096)),
    ("Llama", "Llama 2 70B", _rotary("llama", 32000, 8192, 28672, 80, 64, 8, 4096)),
    ("Llama", "Llama 3.1 8B", _rotary("llama", 128256, 4096, 14336, 32, 32, 8, 131072)),
    ("Llama", "Llama 3.1 70B", _rotary("llama", 128256, 8192, 28672, 80, 64, 8, 131072)),
    ("Llama", "Llama 3.2 1B", _rotary("llama", 128256, 2048, 8192, 16, 32, 8, 131072, **TIED)),
    ("Llama", "Llama 3.2 3B", _rotary("llama", 128256, 3072, 8192, 28, 24, 8, 131072, **TIED)),
    ("Mistral", "Mistral 7B v0.1", _rotary("mistral", 32000, 4096, 14336, 32, 32, 8, 32768)),
    ("Mistral", "Mistral 7B v0.3", _rotary("mistral", 32768, 4096, 14336, 32, 32, 8, 32768)),
    ("Qwen2", "Qwen2.5 0.5B", _rotary("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, **TIED)),
    ("Qwen2", "Qwen2.5 1.5B", _rotary("qwen2", 151936, 1536, 8960, 28, 12, 2, 32768, **TIED)),
    ("Qwen2", "Qwen2.5 3B", _rotary("qwen2", 151936, 2048, 11008, 36, 16, 2, 32768, **TIED)),
    ("Qwen2", "Qwen2.5 7B", _rotary("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768)),
    ("Qwen2", "Qwen2.5 14B", _rotary("qwen2", 152064, 5120, 13824, 48, 40, 8, 32768)),
    ("Qwen2", "Qwen2.5 32B", _rotary("qwen2", 152064, 5120, 27648, 64, 40, 8, 32768)),
    ("Qwen3", "Qwen3 0.6B", _rotary("qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, **QWEN, **TIED)),
    ("Qwen3", "Qwen3 1.7B", _rotary("qwen3", 151936, 2048, 6144, 28, 16, 8, 40960, **QWEN, **TIED)),
    ("Qwen3", "Qwen3 4B", _rotary("qwen3", 151936, 2560, 9728, 36, 32, 8, 40960, **QWEN, **TIED)),
    ("Qwen3", "Qwen3 8B", _rotary("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, **QWEN)),
    ("Qwen3", "Qwen3 14B", _rotary("qwen3", 151936, 5120, 17408, 40, 40, 8, 40960, **QWEN)),
    ("Qwen3", "Qwen3 32B", _rotary("qwen3", 151936, 5120, 25600, 64, 64, 8, 40960, **QWEN)),
    ("Gemma 2", "Gemma 2 2B", _rotary("gemma2", 256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256)),
    ("Gemma 2", "Gemma 2 9B", _rotary("gemma2", 256000, 3584, 14336, 42, 16, 8, 8192, head_dim=256)),
    ("Gemma 2", "Gemma 2 27B", _rotary("gemma2", 256000, 4608, 36864, 46, 32, 16, 8192, head_dim=128)),
    ("Gemma 3", "Gemma 3 1B", _rotary("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 32768, head_dim=256)),
    ("Gemma 3", "Gemma 3 4B", _rotary("gemma3_text", 262208, 2560, 10240, 34, 8, 4, 131072, head_dim=256)),
    ("Gemma 3", "Gemma 3 12B", _rotary("gemma3_text", 262208, 3840, 15360, 48, 16, 8, 131072, head_dim=256)),
    ("Gemma 3", "Gemma 3 27B", _rotary("gemma3_text", 262208, 5376, 21504, 62, 32, 16, 131072, head_dim=128)),
    ("Phi-3", "Phi-3 mini 4k", _rotary("phi3", 32064, 3072, 8192, 32, 32, 32, 4096)),
    ("Phi-3", "Phi-4 14B", _rotary("phi3", 100352, 5120, 17920, 40, 40, 10, 16384)),
    ("Phi-3", "Phi-4 mini", _rotary("phi3", 200064, 3072, 8192, 32, 24, 8, 131072, **TIED)),
    ("SmolLM3", "SmolLM3 3B", _rotary("smollm3", 128256, 2048, 11008, 36, 16, 4, 65536)),
    ("OLMo 2", "OLMo 2 7B", _rotary("olmo2", 100352, 4096, 11008, 32, 32, 32, 4096)),
    ("OLMo 2", "OLMo 2 32B", _rotary("olmo2", 100352, 5120, 27648, 64, 40, 8, 4096)),
    ("Granite", "Granite 3.3 2B", _rotary("granite", 49159, 2048, 8192, 40, 32, 8, 131072, **TIED)),
    ("Granite", "Granite 3.3 8B", _rotary("granite", 49159, 4096, 12800, 40, 32, 8, 131072, **TIED)),
    ("GPT-2", "GPT-2 XL", _gpt2(1600, 48, 25)),
)


def _count(parameters: int) -> str:
    millions = round(parameters / 1e6)
    return f"{parameters / 1e9:.1f}B" if millions >= 1000 else f"{millions}M"


def _context(size: Footprint, memory: int) -> str:
    if size.weights >= memory:
        return "–"
    tokens = min(size.cached_tokens(memory), size.context)
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _speed(size: Footprint, bandwidth: int) -> str:
    speed = size.tokens_per_second(bandwidth)
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"


def table() -> list[str]:
    """The lines of the table."""
    titles = [
        *("model", "family", "parameters"),
        *("GB bf16", "int8", "int4"),
        *(f"context in {memory} GB" for memory in MEMORIES),
        *(f"tokens/s at {bandwidth} GB/s" for bandwidth in BANDWIDTHS),
    ]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for family, model, fields in MODELS:
        config = models.config_from_dict(fields, only_known=True)
        sizes = [footprint(config, matrix_bits=bits) for bits in FORMATS]
        cells = [model, family, _count(models.num_parameters(config))]
        cells += [f"{size.weights / GB:.1f}" for size in sizes]
        cells += [" / ".join(_context(size, memory * GB) for size in sizes) for memory in MEMORIES]
        cells += [" / ".join(_speed(size, bandwidth * GB) for size in sizes) for bandwidth in BANDWIDTHS]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
