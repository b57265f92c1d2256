"""A small seeded model, and engines over it without a thread, for tests of serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise import models
from tilewise.checkpoint import save_pretrained
from tilewise.data import train_tokenizer
from tilewise.models.llama import LlamaConfig
from tilewise.serve.core import EngineCore
from tilewise.serve.draft_model import DraftModel
from tilewise.serve.model import ServedModel
from tilewise.serve.prefill_budget import PrefillBudget
from tilewise.serve.request import Request
from tilewise.serve.runner import Runner
from tilewise.serve.sampling_params import SamplingParams
from tilewise.serve.scheduler import Limits
from tilewise.settings import EngineSettings, SpeculativeConfig

TEXTS = ["def f(x):\n    return", "class Stack:\n    pass\n" * 8, "import"]
MAX_CONTEXT = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def save_model(directory: Path, **settings: Any) -> Path:
    """A Llama with four heads, by default two layers, and a chat template."""
    num_layers, inner = settings.pop("num_hidden_layers", 2), settings.pop("intermediate_size", 96)
    tokenizer = train_tokenizer(TEXTS * 5, vocab_size=320)
    sizes = {
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
        "eos_token_ids": (0,),
        **settings,
    }
    config = LlamaConfig(tokenizer.get_vocab_size(), 64, inner, num_layers, 4, **sizes)
    rng = np.random.default_rng(1)
    weights = {n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in models.parameter_shapes(config)}
    save_pretrained(directory, config.to_dict(), models.stored_tensors(config, weights), tokenizer)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory


def load(directory: Path, **settings: Any) -> ServedModel:
    """Load with space for eight sequences and sixteen blocks."""
    usual = {"dtype": "f32", "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return ServedModel(directory, EngineSettings(**{**usual, **settings}))


def core_of(
    model: ServedModel,
    limits: Limits | None = None,
    speculation: SpeculativeConfig | None = None,
    draft_model: DraftModel | None = None,
    free_tokens: int | None = None,
) -> EngineCore:
    """An engine without a thread that always reads prompts in the same chunks."""
    runner = Runner(model.instance, model.limits)
    core = EngineCore(runner, limits or model.limits, model.tokenizer, speculation, draft_model)
    core._prefill_budget = FixedPrefillBudget()
    core._prefill_budget.free_tokens = free_tokens or core.scheduler.limits.max_num_batched_tokens
    return core


class FixedPrefillBudget(PrefillBudget):
    """Ignores measured times."""

    def note(self, num_tokens: int, is_decode: bool, seconds: float) -> None:
        pass


def request_of(
    name: str, ids: Sequence[int], params: SamplingParams, salt: int = 0, priority: int = 0
) -> Request:
    """A request that shares blocks with others of its salt."""
    return Request(
        name,
        tuple(ids),
        params.sampling(MAX_CONTEXT - len(ids)),
        params.output_options(),
        frozenset([0]),
        priority,
        ((b"salt", bytes([salt])),),
        MAX_CONTEXT,
    )
