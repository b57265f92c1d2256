"""A small model with a chat template, and conversations, for tests of fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise import models
from tilewise.checkpoint import save_pretrained
from tilewise.data import train_tokenizer

MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}[end]"
    "{% endgeneration %}{% else %}{{ m.content }}[end]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SPECIAL = ("[end]", "[system]", "[user]", "[assistant]")
VOCABULARY = 300


def write_chat_model(folder: Path, template: str = MARKED) -> Path:
    """A Llama of one layer with random weights, a tokenizer and a chat template."""
    tokenizer = train_tokenizer(["one and two make three ünd € 😀 "], VOCABULARY, special_tokens=SPECIAL)
    config = models.config_from_dict(
        {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
         "num_hidden_layers": 1, "num_attention_heads": 4, "tie_word_embeddings": True, "eos_token_id": 0}
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in models.parameter_shapes(config)
    }
    save_pretrained(folder, config.to_dict(), models.stored_tensors(config, weights), tokenizer)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def conversation(number: int) -> list[dict[str, str]]:
    """A conversation with one answer or two."""
    messages = [
        {"role": "user", "content": f"After {number}?"},
        {"role": "assistant", "content": f"{number + 1}."},
    ]
    if number % 3 == 0:
        messages.insert(0, {"role": "system", "content": "Count."})
        messages += [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!" * (1 + number % 7)},
        ]
    return messages


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """Records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
