"""A small plan without native code, and changed plan files: shared by the tests of plan files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pure.plans import plan_graph, with_update
from tilewise.graph import GraphBuilder
from tilewise.ir.hints import Hint
from tilewise.models import build_training_graph
from tilewise.models.llama import LlamaConfig
from tilewise.optim import AdamW, Optimizer, ParameterGroup
from tilewise.plan import Plan
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
) -> Plan:
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
def small() -> Plan:
    """The plan that most tests change."""
    return make()


@cache
def small_file() -> bytes:
    """Its file."""
    return encode_plan(small())


def sealed(body: bytes, version: int = 2) -> bytes:
    """A file around a body, with a matching digest."""
    return f"tilewise plan {version} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """A file's JSON and its arrays."""
    body = content[content.index(b"\n") + 1 :]
    end = 8 + int.from_bytes(body[:8], "little")
    return json.loads(body[8:end]), body[end:]


def packed(rows: bytes, arrays: bytes) -> bytes:
    """The file of some JSON and arrays."""
    return sealed(len(rows).to_bytes(8, "little") + rows + arrays)


def edited(change: Callable[[dict[str, Any]], object], content: bytes | None = None) -> bytes:
    """The small plan's file with its JSON changed in place, and a matching digest."""
    document, arrays = parts(small_file() if content is None else content)
    change(document)
    return packed(json.dumps(document).encode(), arrays)


def place(document: dict[str, Any], record: str, field: str) -> tuple[int, int]:
    """Numbers of a class and, in its rows, of a field."""
    names = [name for name, _ in document["records"]]
    number = names.index(record)
    return number, document["records"][number][1].index(field) + 1


def set_field(record: str, field: str, value: Any, which: int = 0) -> Callable[[dict[str, Any]], object]:
    """A change of one field of the which-th row of a class; a callable gets the old value."""

    def change(document: dict[str, Any]) -> None:
        number, at = place(document, record, field)
        row = [r for r in document["rows"] if r[0] == number][which]
        row[at] = value(row[at]) if callable(value) else value

    return change
