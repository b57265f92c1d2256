"""A small plan without native code, and its bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pure.plans import plan_graph, with_update
from tilewise.graph import GraphBuilder
from tilewise.ir.hints import Hint
from tilewise.models import build_training_graph
from tilewise.models.llama import LlamaConfig
from tilewise.optim import AdamW, Optimizer, ParameterGroup
from tilewise.plan import PlanTables
from tilewise.plan.file import encode_plan

GROUPS = (ParameterGroup("*norm.weight", lr=0.5, changes={"eps": 1e-6}),)


def make(
    *,
    layers: int = 1,
    mesh: dict[str, int] | None = None,
    accumulation: int = 1,
    batch_splits: int = 4,
    workers: int = 1,
    optimizer: Optimizer | None = None,
    name: str = "llama",
    seq: int = 8,
    hints: Mapping[str, Hint] | None = None,
) -> PlanTables:
    """A training step of a tiny Llama; `hints` are layouts of tensors by name."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    builder = GraphBuilder(name)
    build_training_graph(builder, config, 4, seq, "f32")
    for tensor, hint in (hints or {}).items():
        builder.constrain(builder.find(tensor), hint)
    optimizer = AdamW(groups=GROUPS) if optimizer is None else optimizer
    graph, options = with_update(builder, optimizer), {"batch_splits": batch_splits, "workers": workers}
    return plan_graph(graph, mesh or {"dp": 2}, accumulation, optimizer=optimizer, **options)


@cache
def small() -> PlanTables:
    """The plan that most tests change."""
    return make()


@cache
def small_bytes() -> bytes:
    """What its digest covers."""
    return encode_plan(small())


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON in a plan's bytes, and its arrays."""
    body = content[content.index(b"\n") + 1 :]
    end = 8 + int.from_bytes(body[:8], "little")
    return json.loads(body[8:end]), body[end:]
