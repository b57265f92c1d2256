"""Readers of what says how a tokenizer and a conversation are written: tokenizer_config.json, chat templates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tilewise.checkpoint import load_tokenizer, load_tokenizer_config
from tilewise.core import ConfigError
from tilewise.data import END_OF_TEXT, train_tokenizer
from tilewise.generate import template_child
from tilewise.generate.prompts import encode_prompt


@cache
def _trained() -> Any:
    """A tokenizer.json of bytes and merges."""
    return json.loads(train_tokenizer(["def f(x):\n    return x\n" * 9], 300).to_str())


def _bytes(content: object) -> bytes:
    return json.dumps(content).encode()


def read_tokenizer_config(folder: Path, data: bytes) -> None:
    """tokenizer_config.json beside vocab.json and merges.txt: what is accepted encodes a text."""
    trained = _trained()["model"]
    if not (folder / "vocab.json").exists():
        (folder / "vocab.json").write_bytes(_bytes(trained["vocab"]))
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in trained["merges"])
        (folder / "merges.txt").write_text("\n".join(merges))
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer_config.json").write_bytes(data)
    assert all(isinstance(text, str) for text in load_tokenizer_config(folder).chat_templates.values())
    encode_prompt(load_tokenizer(folder, 1 << 20), "def f(x): <|im_end|>")


def tokenizer_configs() -> list[bytes]:
    flags = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    next_ = len(_trained()["model"]["vocab"])
    return [
        _bytes(
            {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END_OF_TEXT, "chat_template": "{{ messages }}"}
        ),
        _bytes(
            {
                "added_tokens_decoder": {str(next_): {"content": "<|im_end|>", **flags}},
                "bos_token": {"content": "<|im_end|>", **flags, "__type": "AddedToken"},
                "pad_token": None,
                "add_bos_token": True,
                "add_eos_token": False,
                "add_prefix_space": True,
                "tokenizer_class": "GPT2Tokenizer",
                "model_max_length": 1e30,
                "chat_template": [
                    {"name": "default", "template": "a"},
                    {"name": "tool_use", "template": "b"},
                ],
            }
        ),
    ]


def read_chat_template(folder: Path, data: bytes) -> None:
    """chat_template.jinja: a text or words about what is wrong, in this process, without what stops a child."""
    (folder / "chat_template.jinja").write_bytes(data)
    template = load_tokenizer_config(folder).chat_templates["default"]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    variables = {"messages": messages, "tools": tools, "bos_token": "<s>", "add_generation_prompt": True}
    found = template_child.problem_of(template, variables)
    json.dumps(found, allow_nan=False)
    assert found.keys() in ({"text"}, {"problem"})
    if "problem" in found:
        raise ConfigError(" ".join(found["problem"].split()))


def chat_templates() -> list[bytes]:
    one = (
        "{{ bos_token }}{% set ns = namespace(a=0) %}{%- for m in messages -%}\n  {%- if m.role == 'user' -%}"
        "[{{ m['content'] | trim }}]{% set ns.a = ns.a + 1 %}{% else %}{{ raise_exception('no') if m.x else ns.a }}"
        "{%- endif %}\n{% endfor %}{% if add_generation_prompt %}{{ '<|a|>' ~ loop }}{% endif %}"
    )
    two = (
        "{% macro f(t) %}{{ t | tojson(indent=2) }}{% endmacro %}{% for t in tools %}{{ f(t.function) }}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
        "{% generation %}{{ messages[1:] | map(attribute='content') | join(', ') }}{% endgeneration %}"
    )
    return [one.encode(), two.encode()]
