"""Digests of plans: equal plans have equal digests, and every field counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError, fields, replace
from types import MappingProxyType

import numpy as np
import pytest

from pure.plan.plan_bytes import make, parts, small, small_bytes
from tilewise.core.errors import PlanError
from tilewise.ir.file.fields import SharedInts, fields_of, records_of
from tilewise.optim import SGD, AdamW
from tilewise.plan import PlanTables
from tilewise.plan.file import encode_plan


def count_rows(content):
    """Rows per class of records."""
    document, _ = parts(content)
    return Counter(document["records"][row[0]][0] for row in document["rows"])


def test_equal_plans_have_equal_bytes():
    """Planning again gives the same bytes, whatever was planned in between; their digest is the plan's."""
    make(layers=2)
    assert encode_plan(make()) == small_bytes()
    assert small_bytes().split(b"\n")[0].decode().split()[-1] == small().digest()


def test_every_field_is_written():
    """No field of a record of a plan is left out, except those computed from others."""
    for record in records_of(PlanTables).values():
        own = record._fields if hasattr(record, "_fields") else [f.name for f in fields(record) if f.init]
        assert list(fields_of(record)) == list(own)
    names = {name for name, _ in parts(small_bytes())[0]["records"]}
    assert {
        "PlanTables",
        "Graph",
        "GraphLayout",
        "PendingReduction",
        "Collective",
        "Instruction",
        "Buffer",
    } <= names
    assert names <= set(records_of(PlanTables)) | {SharedInts.__name__}


def _with_constant(plan, change):
    values = {t: change(v.copy()) for t, v in plan.graph.constant_values.items()}
    return replace(plan, graph=replace(plan.graph, constant_values=values))


def _with_float(plan, value):
    """Set the first float of an op's attributes."""
    ops = list(plan.graph.ops)
    at = next(i for i, op in enumerate(ops) if any(isinstance(v, float) for v in op.attrs.values()))
    attrs = {k: value if isinstance(v, float) else v for k, v in ops[at].attrs.items()}
    ops[at] = replace(ops[at], attrs=attrs)
    return replace(plan, graph=replace(plan.graph, ops=tuple(ops)))


CHANGES = {
    "layers": lambda: make(layers=2),
    "mesh": lambda: make(mesh={"dp": 1, "tp": 2}),
    "names of axes": lambda: make(mesh={"dp": 2, "tp": 1}),
    "microbatches": lambda: make(accumulation=2),
    "batch_splits": lambda: make(batch_splits=2),
    "workers": lambda: make(workers=2),
    "graph name": lambda: make(name="other"),
    "sequence": lambda: make(seq=4),
    "optimizer": lambda: make(optimizer=SGD(nesterov=True)),
    "a setting of it": lambda: make(optimizer=AdamW(beta1=0.8)),
    "one that only runs see": lambda: replace(small(), optimizer=replace(small().optimizer, beta1=0.8)),
    "no optimizer": lambda: replace(small(), optimizer=None),
    "a bit of a constant": lambda: _with_constant(
        small(), lambda v: np.nextafter(v, 9) if v.dtype.kind == "f" else v
    ),
    "the sign of zero": lambda: _with_float(small(), -0.0),
    "an entry": lambda: replace(small(), outside={**small().outside, 0: (1,)}),
    "order of outputs": lambda: replace(
        small(), graph=replace(small().graph, outputs=dict(reversed(small().graph.outputs.items())))
    ),
    "overhead": lambda: replace(small(), overhead={"scratch": 1}),
    "room for checkpoints": lambda: replace(
        small(), settings=replace(small().settings, is_checkpointed=True)
    ),
    "signals": lambda: replace(small(), num_signals=small().num_signals + 1),
    "a layout": lambda: replace(small(), layouts=small().layouts[1:]),
    "a buffer": lambda: replace(
        small(), placements=(replace(small().placement(0), buffers=small().placement(0).buffers[:-1]),)
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_different_plans_have_different_digests(what):
    """Inputs of planning, and every part of a plan."""
    digests = {small().digest(), _with_float(small(), 0.0).digest(), CHANGES[what]().digest()}
    assert len(digests) == 3


def test_plans_compare_by_content():
    """A plan with constants equals a new one, and no other plan; comparing sets no attribute."""
    plan = small()
    assert any(value.size > 1 for value in plan.graph.constant_values.values())
    assert make() == plan != CHANGES["a bit of a constant"]()
    assert plan.graph != plan
    with pytest.raises(FrozenInstanceError):
        plan.note = 1


def test_mappings_of_other_types_have_equal_digests():
    """A digest covers values, not the types of mappings."""
    proxied = replace(small(), outside=MappingProxyType(dict(small().outside)))
    assert proxied.digest() == small().digest()


def test_deep_model_is_a_small_file():
    """A layer adds its tensors' names and entries: templates are written once."""
    files = [encode_plan(make(layers=n)) for n in (2, 12, 22)]
    sizes = [len(content) for content in files]
    assert sizes[2] - sizes[1] < 1.2 * (sizes[1] - sizes[0])
    counts = [count_rows(content) for content in files[:2]]
    once = ("LoweredTemplate", "TempSpec", "Collective", "Graph", "Template", "GraphLayout")
    assert {n: counts[0][n] for n in once} == {n: counts[1][n] for n in once}


def nested(depth):
    """A number in so many tuples."""
    return 1 if depth == 0 else (nested(depth - 1),)


def _with_attribute(value):
    ops = list(small().graph.ops)
    ops[0] = replace(ops[0], attrs={**ops[0].attrs, "mine": value})
    return replace(small(), graph=replace(small().graph, ops=tuple(ops)))


@pytest.mark.parametrize(
    "value",
    [..., 1 << 64, float("nan"), [1], {1}, "a\nb", np.ones(2), {(1,): 2}, {0.5: 1}, {True: 1}, nested(18)],
    ids=repr,
)
def test_attributes_that_are_not_plain_data_are_rejected(value):
    """A user's op attribute that bytes cannot hold: the error names the op."""
    op = small().graph.ops[0].op
    with pytest.raises(
        PlanError, match=rf"^\[plan.digest\] .* must .*; got .*, in OpNode '{op}'; got the plan of"
    ):
        _with_attribute(value).digest()
    _with_attribute({"a": nested(16), 1: {"b": (None, True, 0.5)}}).digest()
