"""Prints the table of docs/models.md that says how many devices can share the heads of published models."""

from __future__ import annotations

from tilewise.models.widths import default_k_splits, widths_of_heads

# family, model, query heads, KV heads: from the config.json of each
MODELS = (
    ("Llama", "Llama 2 7B", 32, 32),
    ("Llama", "Llama 2 13B", 40, 40),
    ("Llama", "Llama 3.1 8B", 32, 8),
    ("Llama", "Llama 3.1 70B", 64, 8),
    ("Llama", "Llama 3.2 1B", 32, 8),
    ("Llama", "Llama 3.2 3B", 24, 8),
    ("Llama", "SmolLM2 135M", 9, 3),
    ("Llama", "SmolLM2 360M", 15, 5),
    ("Llama", "SmolLM2 1.7B", 32, 32),
    ("Llama", "TinyLlama 1.1B", 32, 4),
    ("Mistral", "Mistral 7B", 32, 8),
    ("Qwen2", "Qwen2.5 0.5B", 14, 2),
    ("Qwen2", "Qwen2.5 1.5B", 12, 2),
    ("Qwen2", "Qwen2.5 7B", 28, 4),
    ("Qwen2", "Qwen2.5 14B", 40, 8),
    ("Qwen2", "Qwen2.5 72B", 64, 8),
    ("Qwen3", "Qwen3 0.6B", 16, 8),
    ("Qwen3", "Qwen3 8B", 32, 8),
    ("Qwen3", "Qwen3 14B", 40, 8),
    ("Gemma 2", "Gemma 2 2B", 8, 4),
    ("Gemma 2", "Gemma 2 27B", 32, 16),
    ("Gemma 3", "Gemma 3 1B", 4, 1),
    ("Gemma 3", "Gemma 3 4B", 8, 4),
    ("Gemma 3", "Gemma 3 27B", 32, 16),
    ("Phi-3", "Phi-3 mini", 32, 32),
    ("Phi-3", "Phi-3 medium", 40, 10),
    ("Phi-3", "Phi-4 mini", 24, 8),
    ("SmolLM3", "SmolLM3 3B", 16, 4),
    ("OLMo 2", "OLMo 2 7B", 32, 32),
    ("OLMo 2", "OLMo 2 32B", 40, 8),
    ("Granite", "Granite 3.3 8B", 32, 8),
    ("GPT-2", "GPT-2", 12, 12),
    ("GPT-2", "GPT-2 XL", 25, 25),
    ("BERT", "BERT base", 12, 12),
    ("BERT", "BERT large", 16, 16),
)


def table() -> list[str]:
    """The lines of the table."""
    lines = ["| model | query heads | KV heads | k splits | devices |", "|---|---|---|---|---|"]
    for _, model, heads, kv_heads in MODELS:
        widths = ", ".join(map(str, widths_of_heads(heads, kv_heads)))
        lines.append(f"| {model} | {heads} | {kv_heads} | {default_k_splits(heads, kv_heads)} | {widths} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
