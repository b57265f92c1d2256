"""Files of plans: equal plans have equal files, every field counts, and files round-trip."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import pytest

import tilewise as tw
from pure.plan.plan_bytes import make, parts, small, small_file
from tilewise.core.errors import PlanError, ResourceError
from tilewise.graph import GraphBuilder
from tilewise.ir.file.fields import SharedInts, fields_of, records_of
from tilewise.optim import AdamW, Optimizer
from tilewise.plan import Plan
from tilewise.plan.file import encode_plan


def count_rows(content):
    """Rows per class of records."""
    document, _ = parts(content)
    return Counter(document["records"][row[0]][0] for row in document["rows"])


MESHES = {
    "dp2tp2": {"mesh": {"dp": 2, "tp": 2}},
    "accumulated": {"mesh": {"dp": 2}, "accumulation": 2},
    "three": {"mesh": {"dp": 1}, "layers": 3},
}


def same(first, second):
    """Equality of two parts of plans; arrays by their bits, floats with their sign, types too."""
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    if is_dataclass(first):
        return type(first) is type(second) and all(
            same(getattr(first, f.name), getattr(second, f.name)) for f in fields(first) if f.init
        )
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if hasattr(first, "items"):
        return list(first) == list(second) and all(same(v, second[k]) for k, v in first.items())
    if type(first) is not bool and isinstance(first, int):  # enumerations come back as their numbers
        return first == second and type(second) is int
    return type(first) is type(second) and repr(first) == repr(second)


@pytest.mark.parametrize("name", MESHES)
def test_plan_round_trips(name, tmp_path):
    """Every field of every record is equal to the bit and in order."""
    plan = make(**MESHES[name])
    plan.save(tmp_path / "step.plan")
    loaded = Plan.load(tmp_path / "step.plan")
    assert all(same(getattr(plan, f.name), getattr(loaded, f.name)) for f in fields(plan))
    assert loaded.digest() == plan.digest() and loaded.explain() == plan.explain()
    assert loaded.traffic() == plan.traffic()
    assert os.listdir(tmp_path) == ["step.plan"]
    checkpointed = replace(plan, settings=replace(plan.settings, is_checkpointed=True))
    checkpointed.save(tmp_path / "step.plan")
    assert Plan.load(tmp_path / "step.plan").checkpoint_bytes == checkpointed.checkpoint_bytes
    assert sum(checkpointed.checkpoint_bytes) > 0


def test_equal_plans_have_equal_files():
    """Planning again gives the same bytes, whose first line has the digest; it covers bits of values, not types."""
    assert encode_plan(make()) == small_file()
    assert small_file().split(b"\n")[0].decode() == f"tilewise plan 2 {small().digest()}"
    assert replace(small(), outside=MappingProxyType(dict(small().outside))).digest() == small().digest()
    assert _with_float(small(), 0.0).digest() != _with_float(small(), -0.0).digest()


def test_every_field_is_written():
    """No field of a record of a plan is left out, except those computed from others."""
    for record in records_of(Plan).values():
        own = record._fields if hasattr(record, "_fields") else [f.name for f in fields(record) if f.init]
        assert list(fields_of(record)) == list(own)
    names = {name for name, _ in parts(small_file())[0]["records"]}
    assert {"Plan", "Graph", "GraphLayout", "PendingReduction", "Reduction", "Instruction", "Buffer"} <= names
    assert names <= set(records_of(Plan)) | {SharedInts.__name__}


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
    "mesh": lambda: make(mesh={"dp": 1, "tp": 2}),
    "names of axes": lambda: make(mesh={"dp": 2, "tp": 1}),
    "batch_splits": lambda: make(batch_splits=2),
    "a setting of it": lambda: make(optimizer=AdamW(beta1=0.8)),
    "one that only runs see": lambda: replace(small(), optimizer=replace(small().optimizer, beta1=0.8)),
    "no optimizer": lambda: replace(small(), optimizer=None),
    "a bit of a constant": lambda: _with_constant(
        small(), lambda v: np.nextafter(v, 9) if v.dtype.kind == "f" else v
    ),
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
    "a buffer": lambda: replace(small(), buffers=small().buffers[:-1]),
}


def test_different_plans_have_different_digests():
    """Inputs of planning, and every part of a plan."""
    digests = {what: change().digest() for what, change in CHANGES.items()}
    assert len({small().digest(), *digests.values()}) == 1 + len(CHANGES), digests


def test_plans_compare_by_content(tmp_path):
    """A plan with constants equals its loaded file, and no other plan; comparing sets no attribute."""
    plan = small()
    assert any(value.size > 1 for value in plan.graph.constant_values.values())
    plan.save(tmp_path / "a.plan")
    assert Plan.load(tmp_path / "a.plan") == plan != CHANGES["a bit of a constant"]()
    assert plan.graph != plan
    with pytest.raises(FrozenInstanceError):
        plan.note = 1


def test_deep_model_is_a_small_file():
    """A layer adds its tensors' names and entries: templates are written once."""
    files = [encode_plan(make(layers=n)) for n in (2, 12, 22)]
    sizes = [len(content) for content in files]
    assert sizes[2] - sizes[1] < 1.2 * (sizes[1] - sizes[0])
    counts = [count_rows(content) for content in files[:2]]
    once = ("LoweredTemplate", "TempSpec", "Reduction", "Graph", "Template", "GraphLayout")
    assert {n: counts[0][n] for n in once} == {n: counts[1][n] for n in once}


def test_names_are_not_paths(tmp_path):
    """A tensor may be called like a path: nothing is written there."""
    builder = GraphBuilder("../graph")
    x = builder.input([4, 8], "f32", name="../../escaped")
    builder.output(builder.scale(x, 2.0), "/y")
    assert x.spec.name == "../../escaped"
    plan = replace(small(), graph=replace(small().graph, name="../../escaped"))
    (tmp_path / "in").mkdir()
    plan.save(tmp_path / "in" / "a.plan")
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "a.plan"]


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """An optimizer of a user."""

    decay: float = 0.9
    states = ("velocity",)

    def update(self, parameter):
        """Plain momentum."""
        velocity = self.decay * parameter.states["velocity"] + parameter.gradient
        parameter.weight = parameter.weight - parameter.hyper["lr"] * velocity
        parameter.states["velocity"] = velocity


def test_optimizer_of_a_user_is_read_back(tmp_path):
    """Its class is found by name in this process, also where its annotations are local to a function."""

    class Local:
        pass

    @dataclass(frozen=True, kw_only=True)
    class Remembering(Momentum):
        seen: ClassVar[Local | None] = None

    make(optimizer=Remembering(decay=0.8)).save(tmp_path / "a.plan")
    optimizer = Plan.load(tmp_path / "a.plan").optimizer
    assert type(optimizer) is Remembering and optimizer == Remembering(decay=0.8)


def test_name_taken_by_another_class_is_rejected(tmp_path):
    """Two classes of one name are ambiguous in a file; the later one owns the name."""
    taken = type("Taken", (Momentum,), {})
    plan = replace(small(), optimizer=taken())
    type("Taken", (Momentum,), {})
    again = type("Taken", (Momentum,), {})
    with pytest.raises(PlanError, match=r"\[plan.save\] a name must belong to one class; got 'Taken'"):
        plan.save(tmp_path / "a.plan")
    assert replace(small(), optimizer=again()).digest() != small().digest()


def nested(depth):
    """A number in so many tuples."""
    return 1 if depth == 0 else (nested(depth - 1),)


def test_saved_attributes_can_be_loaded(tmp_path):
    """Values of attributes of the allowed depth, and mappings by text or number."""
    value = {"a": nested(16), 1: {"b": (None, True, 0.5)}}
    _with_attribute(value).save(tmp_path / "a.plan")
    with pytest.raises(
        PlanError, match="attributes are none"
    ):  # the file is read, and the op's own rule rejects the attribute
        Plan.load(tmp_path / "a.plan")


def _with_attribute(value):
    ops = list(small().graph.ops)
    ops[0] = replace(ops[0], attrs={**ops[0].attrs, "mine": value})
    return replace(small(), graph=replace(small().graph, ops=tuple(ops)))


@pytest.mark.parametrize(
    "value", [1 << 64, float("nan"), [1], "a\nb", np.ones(2), {(1,): 2}, nested(18)], ids=repr
)
def test_attributes_that_are_not_plain_data_are_rejected(value, tmp_path):
    """A user's op attribute that a file cannot hold: the error names the op, and the old file is kept."""
    small().save(tmp_path / "a.plan")
    op = small().graph.ops[0].op
    with pytest.raises(
        PlanError, match=rf"^\[plan.save\] .* must .*; got .*, in OpNode '{op}'; got the plan of 'llama'"
    ):
        _with_attribute(value).save(tmp_path / "a.plan")
    assert Plan.load(tmp_path / "a.plan").digest() == small().digest()
    with pytest.raises(PlanError, match=r"\[plan.digest\]"):
        _with_attribute(value).digest()


def test_unwritable_path_is_one_error(tmp_path):
    """A missing directory, a directory at the path, an invalid path."""
    with pytest.raises(ResourceError, match="writable"):
        small().save(tmp_path / "missing" / "a.plan")
    (tmp_path / "a.plan").mkdir()
    with pytest.raises(ResourceError, match="writable"):
        small().save(tmp_path / "a.plan")
    with pytest.raises(PlanError, match="path must be a path"):
        small().save(b"a")
    assert os.listdir(tmp_path) == ["a.plan"]


@pytest.mark.parametrize("longest", [8, 64])
def test_rows_and_tiles_of_one_length_are_loaded(longest, tmp_path):
    """Rows and rows per tile that depend on one length are counted for lengths that a run may have."""
    label = tw.DimLabel("x", 2)
    graph = tw.ComputeGraph("lengths", k_splits=12)
    x = graph.input([4, tw.Dim("seq", 1, longest), 24], name="x", labels=[tw.BATCH, None, label])
    graph.loss(graph.sum(graph.relu(tw.nn.linear(graph, x, "w", 24, in_label=label))))
    graph.set_distribution(tw.DistributionStrategy(tw.ParallelismMode.HYBRID, {"a": 3}, {"x": "a"}))
    plan, path = graph.plan(workers_per_device=1), tmp_path / "p.plan"
    plan.save(path)
    assert Plan.load(path).digest() == plan.digest()
    fewer = replace(plan, num_signals=plan.num_signals - 1)
    fewer.save(path)
    with pytest.raises(PlanError, match=r"uses \d+ signals of"):
        Plan.load(path)
