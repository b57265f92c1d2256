"""Plan files: a plan is made again from its file, to the bit; no other file is accepted."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import PlanError, ResourceError
from tilewise.ir.hints import Replicate, Shard
from tilewise.nn import linear
from tilewise.optim import Optimizer
from tilewise.strategy import StateSharding

MLP = tw.DimLabel("mlp")


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


@tw.layer
def block(graph, x):
    """Two products and an activation."""
    hidden = graph.relu(linear(graph, x, "up", 64, out_label=MLP))
    return graph.add(x, linear(graph, hidden, "down", 64, in_label=MLP))


def graph_of(optimizer=None, seq=4, layers=2):
    """A trained stack of layers over `[batch, seq, 64]`."""
    graph = tw.ComputeGraph("stack")
    x = graph.input([8, seq, 64], name="x", labels=[tw.BATCH, None, None])
    for i in range(layers):
        x = block(graph, x, path=f"layers.{i}")
    graph.loss(graph.scale(graph.sum(x), 0.01))
    graph.optimize(optimizer or tw.optim.AdamW(groups=(tw.optim.ParameterGroup("*.down", lr=0.5),)))
    return graph


LAYOUTS = {"layers.*.up": ("tp",), "layers.0.down": {"tp": Shard(1), "dp": Replicate()}}
CASES = {
    "one device": ({}, None, {}),
    "a mesh": ({"mesh": {"dp": 2, "tp": 2}, "accumulation": 2, "batch_splits": 8}, None, {}),
    "a custom optimizer": ({"rows_per_tile": 8}, None, {"optimizer": Momentum(decay=0.5)}),
    "a size of a symbol": ({"sizes": {"seq": 3}, "strict": True}, None, {"seq": tw.Dim("seq", 1, 9)}),
    "recomputed and offloaded": (
        {
            "recompute": ["layers.0", "layers.*/relu"],
            "offload": ("optimizer", "parameters"),
            "checkpoints": True,
        },
        None,
        {},
    ),
    "sharded state": (
        {"recompute": "full"},
        tw.DistributionStrategy.hybrid(
            dp=2, fsdp=2, sharding=StateSharding(("fsdp",), prefetch=2, units=("layers.*",))
        ),
        {},
    ),
    "layouts by name": (
        {},
        tw.DistributionStrategy(
            tw.ParallelismMode.HYBRID, {"dp": 2, "tp": 2}, {"batch": "dp", "mlp": "tp"}, LAYOUTS
        ),
        {},
    ),
}


def planned(name):
    """The plan of a case."""
    options, strategy, of = CASES[name]
    graph = graph_of(**of)
    if strategy is not None:
        graph.set_distribution(strategy)
    return graph.plan(workers_per_device=1, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_made_again_from_its_file(name, tmp_path):
    """Every table is equal, and the file of the loaded plan is the same file; it contains no instruction."""
    plan = planned(name)
    plan.save(tmp_path / "a.plan")
    loaded = tw.Plan.load(tmp_path / "a.plan")
    assert loaded == plan and loaded.digest() == plan.digest()
    loaded.save(tmp_path / "b.plan")
    content = (tmp_path / "a.plan").read_bytes()
    assert (tmp_path / "b.plan").read_bytes() == content and b"Instruction" not in content
    assert sorted(os.listdir(tmp_path)) == ["a.plan", "b.plan"]


def test_what_the_machine_chose_is_in_the_file(tmp_path, monkeypatch):
    """A machine with more cores plans the same workers and batch splits from the file."""
    plan = graph_of().plan({"dp": 2})
    plan.save(tmp_path / "a.plan")
    monkeypatch.setattr("tilewise.plan.settings.num_cores", lambda: 64)
    assert graph_of().plan({"dp": 2}) != plan == tw.Plan.load(tmp_path / "a.plan")


def test_a_changed_plan_is_rejected(tmp_path):
    """The twin: its tables are not what planning makes of its inputs."""
    plan = planned("one device")
    replace(plan, scratch_bytes=plan.scratch_bytes + 64).save(tmp_path / "a.plan")
    with pytest.raises(PlanError, match="planning its graph gives another plan"):
        tw.Plan.load(tmp_path / "a.plan")
    without = replace(plan, inputs=None)
    with pytest.raises(PlanError, match=r"\[plan.save\] a plan must have its inputs"):
        without.save(tmp_path / "a.plan")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a plan's file; its JSON and arrays."""
    path = tmp_path_factory.mktemp("plans") / "a.plan"
    planned("a mesh").save(path)
    content = path.read_bytes()
    body = content[content.index(b"\n") + 1 :]
    end = 8 + int.from_bytes(body[:8], "little")
    return path, json.loads(body[8:end]), body[end:]


def write(path, document, arrays, version=6):
    """Write a file with a matching digest."""
    rows = json.dumps(document).encode()
    body = len(rows).to_bytes(8, "little") + rows + arrays
    path.write_bytes(f"tilewise plan {version} {hashlib.sha256(body).hexdigest()}\n".encode() + body)


def settings_of(document):
    """The pairs of the settings, in the last row, which is the SavedPlan."""
    return document["rows"][-1][3]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("accumulation", 4, "gives another plan"),
        ("accumulation", 1 << 40, "breaks a rule|microbatches"),
        ("batch_splits", 4, "gives another plan"),
        ("workers_per_device", 2, "gives another plan"),
        ("mesh", ["m", [["dp", 4]]], "gives another plan"),
        ("mesh", ["m", [["dp", 0]]], "breaks a rule"),
        ("mode", "none", "settings are not those of a plan"),
        ("rules", 3, "settings are not those of a plan"),
        ("sharding", ["m", [["depth", 3]]], "settings are not those of a plan"),
        ("layouts", ["m", [["*", ["m", [["dp", 1 << 20]]]]]], "breaks a rule"),
        ("offload", ["t", ["weights"]], "breaks a rule"),
        ("recompute", ["t", ["nothing.*"]], "breaks a rule"),
        ("mesh", -1, "settings are not those of a plan: 'mesh' is -1"),
        ("accumulation", "x", "settings are not those of a plan"),
        ("sizes", None, "settings are not those of a plan"),
        ("unknown", 1, "settings are not those of a plan"),
    ],
)
def test_other_settings_in_a_file_are_rejected(saved, tmp_path, name, value, words):
    """As `ComputeGraph.plan` rejects them, or because they give another plan."""
    _, document, arrays = saved
    document = json.loads(json.dumps(document))
    settings = settings_of(document)
    settings[:] = [pair for pair in settings if pair[0] != name] + [[name, value]]
    write(tmp_path / "b.plan", document, arrays)
    with pytest.raises(PlanError, match=rf"\[plan.load\] a plan file must be .*({words})"):
        tw.Plan.load(tmp_path / "b.plan")


@given(data=st.data())
def test_any_change_of_a_row_is_rejected(saved, tmp_path_factory, data):
    """One value of the rows replaced: another plan or a broken rule, in one error of ours."""
    _, document, arrays = saved
    document = json.loads(json.dumps(document))
    rows = document["rows"]
    row = rows[data.draw(st.integers(0, len(rows) - 1), "row")]
    at = data.draw(st.integers(0, len(row) - 1), "field")
    value = data.draw(st.sampled_from([0, 1, 7, -1, 1 << 40, "x", None, [], [["dp", 3]], ["t", []]]), "value")
    changed = row[at] != value
    row[at] = value
    path = tmp_path_factory.mktemp("changed") / "a.plan"
    write(path, document, arrays)
    try:
        loaded = tw.Plan.load(path)
    except PlanError as error:
        assert str(error).startswith("[plan.load] ") and "\n" not in str(error)
    else:  # what no bit depends on
        assert not changed or loaded == planned("a mesh")


def test_other_files_are_rejected(saved, tmp_path):
    """A file of an earlier version, a damaged one, the file of a graph."""
    path, document, arrays = saved
    other = tmp_path / "b.plan"
    write(other, document, arrays, version=2)
    with pytest.raises(PlanError, match="it has format 2, and this version of Tilewise reads 6"):
        tw.Plan.load(other)
    other.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(PlanError, match="damaged or was changed"):
        tw.Plan.load(other)
    graph_of().save(other)
    with pytest.raises(PlanError, match="does not begin with the line of a plan file"):
        tw.Plan.load(other)


def test_names_of_optimizers_are_looked_up(tmp_path):
    """Two classes of one name are ambiguous; an unknown class is rejected."""
    taken = type("Taken", (Momentum,), {})
    plan = graph_of(taken()).plan({})
    plan.save(tmp_path / "a.plan")
    assert type(tw.Plan.load(tmp_path / "a.plan").optimizer) is taken
    again = type("Taken", (Momentum,), {})
    with pytest.raises(PlanError, match=r"\[plan.digest\] a name must belong to one class; got 'Taken'"):
        plan.save(tmp_path / "a.plan")
    del again


def test_a_path_that_cannot_be_written_is_one_error(tmp_path):
    """A missing directory, a directory at the path, an invalid path; nothing else is written."""
    plan = graph_of(layers=1).plan({})
    with pytest.raises(ResourceError, match="must be written completely"):
        plan.save(tmp_path / "missing" / "a.plan")
    (tmp_path / "a.plan").mkdir()
    with pytest.raises(ResourceError, match="must be writable as a file"):
        plan.save(tmp_path / "a.plan")
    with pytest.raises(PlanError, match="path must be a path"):
        plan.save(b"a")
    assert os.listdir(tmp_path) == ["a.plan"]
