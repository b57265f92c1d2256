"""Graphs as JSON files: a loaded graph has the digest, plan and bits of the saved one."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise import models
from tilewise.core.errors import PlanError, ResourceError, ShapeError
from tilewise.models.llama import LlamaConfig
from tilewise.nn import linear

CONFIG = LlamaConfig(128, 32, 32, 3, 4, num_key_value_heads=2, max_position_embeddings=16)


def reloaded(graph, tmp_path):
    """A graph after a round trip through a file; files of both are equal."""
    file, again = tmp_path / "a.json", tmp_path / "b.json"
    graph.save(file)
    loaded = tw.ComputeGraph.load(file)
    loaded.save(again)
    assert file.read_bytes() == again.read_bytes() and sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]
    assert loaded.freeze() == graph.freeze() and loaded.draft.loss_id == graph.draft.loss_id
    assert loaded.digest() == graph.digest() == json.loads(file.read_bytes())["digest"]
    assert str(loaded) == str(graph) and loaded.to_mermaid() == graph.to_mermaid()
    return loaded


def training(seq=8):
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, CONFIG, 4, seq, "f32")
    return graph


@pytest.mark.parametrize("what", ["training", "padded", "decoding"])
def test_a_loaded_graph_has_the_same_plan(what, tmp_path):
    """Over one device and over four, with symbols and caches."""
    graph = training(tw.Dim("seq", 1, 8)) if what == "padded" else training()
    if what == "decoding":
        graph = tw.ComputeGraph("llama")
        models.build_decoding_graph(graph, CONFIG, 8, 2, 2, "bf16", context=16)
    loaded = reloaded(graph, tmp_path)
    for mesh in ({}, {"tp": 2} if what == "decoding" else {"dp": 2, "tp": 2}):
        assert loaded.plan(mesh).digest() == graph.plan(mesh).digest()


SIZE = 8
UNARY = ["silu", "relu", "tanh", "softmax"]
NAMES = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=6).filter(
    str.isprintable
)
LABELS = st.sampled_from([None, tw.DimLabel("width"), tw.DimLabel("heads", 4, 1), tw.DimLabel('é "x"', 2)])
STEPS = st.tuples(
    st.sampled_from(
        [*UNARY, "add", "multiply", "scale", "linear", "layer", "nested", "constant", "hint", "output"]
    ),
    st.integers(0, 1 << 10),
    st.integers(0, 1 << 10),
    st.floats(-1e3, 1e3, width=32),
    NAMES,
)


@tw.layer
def inner(graph, x, other, *, factor):
    return graph.scale(graph.add(linear(graph, x, "weight", SIZE), other), factor)


@tw.layer
def outer(graph, x, *, count):
    table = graph.constant(np.full((4, SIZE), count, np.float32), name="table")
    for i in range(count):
        x = inner(graph, x, table, path=f"inner.{i}", factor=0.5)
    return graph.silu(x)


def build(name, k_splits, label, steps, has_loss):
    """A graph by a list of steps; each step chooses its operands from the existing tensors."""
    graph = tw.ComputeGraph(name, k_splits=k_splits)
    tensors = [graph.input([4, SIZE], name="x", labels=[tw.BATCH, label])]
    for number, (what, first, second, factor, text) in enumerate(steps):
        a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
        path = f"{text}{number}"
        if what in UNARY:
            tensors += graph.op(what, [a])
        elif what in ("add", "multiply"):
            tensors += graph.op(what, [a, b])
        elif what == "scale":
            tensors.append(graph.scale(a, factor))
        elif what == "linear":
            tensors.append(linear(graph, a, path, SIZE))
        elif what == "layer":
            tensors.append(inner(graph, a, b, path=path, factor=factor))
        elif what == "nested":
            tensors.append(outer(graph, a, path=path, count=second % 3 + 1))
        elif what == "constant":
            value = np.full((4, SIZE), factor, np.float32)
            tensors.append(graph.constant(value, name=path, labels=[tw.BATCH, None]))
        elif what == "hint":
            graph.constrain(a, (("dp", "fsdp")[: second % 3], "tp")[: 1 + first % 2])
        elif a.kind == "result":
            graph.output(a, path)
    last = graph.scale(linear(graph, tensors[-1], "last", SIZE), 1.0)
    graph.loss(graph.mean(last)) if has_loss else graph.output(last, "end")
    return graph


GRAPHS = st.builds(
    build, NAMES, st.sampled_from([1, 4, 8]), LABELS, st.lists(STEPS, max_size=8), st.booleans()
)


@settings(max_examples=40, deadline=None)
@given(graph=GRAPHS)
def test_any_graph_survives_a_round_trip(graph, tmp_path_factory):
    """Equal graph, digest, text, file and plan."""
    loaded = reloaded(graph, tmp_path_factory.mktemp("graphs"))
    plans = []
    for of in (graph, loaded):
        try:
            plans.append(of.plan({"dp": 2}, batch_splits=4, workers_per_device=1).digest())
        except tw.TilewiseError as error:
            plans.append(str(error))
    assert plans[0] == plans[1]


def test_a_loaded_graph_can_be_continued(tmp_path):
    """Equal ops are still merged; a layer is traced again under a new name; names stay taken."""
    steps = [("silu", 0, 0, 1.0, "a"), ("layer", 0, 0, 2.0, "l")]
    graph = build("g", 8, None, steps, False)
    loaded = reloaded(graph, tmp_path)
    x = loaded.find("x")
    count = len(loaded.topological_order())
    loaded.silu(x)
    assert len(loaded.topological_order()) == count
    inner(loaded, x, x, path="more", factor=2.0)
    inner(loaded, x, x, path="yet.more", factor=2.0)
    assert [key.rpartition(".")[2] for key in loaded.freeze().templates] == ["inner", "inner#2"]
    with pytest.raises(ShapeError, match="unique"):
        loaded.input([1], name="x")
    loaded.plan()


def test_strategy_and_optimizer_are_not_in_a_file(tmp_path):
    """A file has only the definition, and is the same before and after they are chosen."""
    graph = training()
    graph.save(tmp_path / "a.json")
    graph.optimize(tw.optim.SGD())
    graph.set_distribution(tw.DistributionStrategy.ddp(2))
    graph.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert tw.ComputeGraph.load(tmp_path / "b.json").plan().digest() == training().plan().digest()


def test_a_file_grows_only_by_names(tmp_path):
    """A layer's structure is stored once."""
    sizes = []
    for count in (10, 20, 30):
        graph = tw.ComputeGraph("deep")
        x = graph.input([4, SIZE], name="x")
        for i in range(count):
            x = outer(graph, x, path=f"layers.{100 + i}", count=2)
        graph.output(x, "y")
        graph.save(tmp_path / "a.json")
        sizes.append((tmp_path / "a.json").stat().st_size)
    assert abs((sizes[2] - sizes[1]) - (sizes[1] - sizes[0])) < 0.05 * sizes[0]
    assert sizes[1] - sizes[0] < 10 * 500


def test_graphs_that_cannot_be_saved_are_rejected(tmp_path):
    """A completed graph, an attribute that is not plain data, an invalid path; an existing file is kept."""
    file = tmp_path / "a.json"
    file.write_text("kept")
    complete = tw.ComputeGraph.thaw(training().complete())
    with pytest.raises(PlanError, match=r"\[session\.save\] .*has only forward ops"):
        complete.save(file)
    graph = build("g", 8, None, [], False)
    graph.draft.ops[-1] = replace(graph.draft.ops[-1], attrs={"factor": object()})
    with pytest.raises(PlanError, match=r"\[session\.save\] .*factor must be a finite number"):
        graph.save(file)
    with pytest.raises(PlanError, match="path"):
        graph.save("a\0b")
    with pytest.raises(ResourceError):
        build("g", 8, None, [], False).save(tmp_path)
    assert file.read_text() == "kept" and os.listdir(tmp_path) == ["a.json"]
