"""Argument validation of a running model: inputs, loading and closing."""

from __future__ import annotations

import resource
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import batches, change_first, config, drop_partial, merge_splits, training_graph

import tilewise as tw
from tilewise import models
from tilewise.core import CheckpointError, PlanError, ResourceError, ShapeError
from tilewise.nn import layer

MODEL = config()


@pytest.fixture(scope="module")
def model():
    graph = training_graph(MODEL, "f32")
    with graph.instantiate() as running:
        running.initialize(0)
        yield running


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda b: {"tokens": b["tokens"]}, "labels"),
        (lambda b: {}, "got none with 'tokens' missing"),
        (lambda b: {**b, "tokens": b["tokens"].astype(np.float32)}, "must be i32"),
        (lambda b: {**b, "tokens": b["tokens"] + np.int64(1 << 40)}, "lie in"),
        (
            lambda b: {**b, "tokens": np.where(b["tokens"] == b["tokens"][0, 0], -1, b["tokens"])},
            r"lie in \[0, 512\)",
        ),
        (lambda b: {**b, "labels": np.where(b["labels"] >= 0, 512, -100)}, "or be -100"),
        (lambda b: {**b, "labels": b["labels"][:, :5]}, "shapes must agree"),
        (lambda b: {**b, "nonsense": b["tokens"]}, "nonsense"),
    ],
)
def test_wrong_inputs_are_rejected(model, change, words):
    """A missing input, another kind or shape, or an index out of range: one error, and nothing runs."""
    before = model.step_count
    with pytest.raises(ShapeError, match=words):
        model.step(change(dict(batches(MODEL, 1)[0])), 1e-3)
    assert model.step_count == before


def test_a_state_of_indices_must_fit_every_size():
    """A state is used by later runs of any size, so its indices must fit the smallest."""
    graph = tw.ComputeGraph("picked")
    x = graph.input([tw.Dim("rows", 2, 8), 4], name="x")
    index = graph.state([2], "i32", name="index", storage="scalars")
    graph.output(graph.gather_rows(x, index), "y")
    with graph.instantiate() as running:
        running.set_tensor("index", np.array([1, 0]))
        with pytest.raises(ShapeError, match=r"lie in \[0, 2\)"):
            running.set_tensor("index", np.array([0, 7]))
        running.forward(x=np.arange(8).reshape(2, 4))
        assert running.get_tensor("y")[:, 0].tolist() == [4, 0]


def pick(graph, x, index, again):
    """Rows of x at computed indices."""
    return graph.gather_rows(x, graph.gather_rows(graph.gather_rows(index, again), again))


pick_in_layer = layer(pick)


@pytest.mark.parametrize("in_layer", [False, True])
def test_gathered_indices_are_validated_by_their_use(in_layer):
    """An index that a graph gathers from an input selects a row, so the whole input is validated."""
    graph = tw.ComputeGraph("picked")
    x = graph.input([3, 4], name="x")
    index, again = (
        graph.input([n], "i32", name=name, storage="scalars") for n, name in ((5, "index"), (5, "again"))
    )
    y = pick_in_layer(graph, x, index, again, path="layer") if in_layer else pick(graph, x, index, again)
    graph.output(y, "y")
    inputs = {
        "x": np.arange(12).reshape(3, 4),
        "index": np.array([2, 0, 1, 2, 0]),
        "again": np.array([1, 0, 2, 2, 4]),
    }
    with graph.instantiate() as running:
        running.forward(**inputs)
        picked = inputs["index"][inputs["again"]][inputs["again"]]
        assert running.get_tensor("y")[:, 0].tolist() == [4 * n for n in picked]
        for name, wrong in (("index", 3), ("index", -1), ("again", 5)):
            value = inputs[name].copy()
            value[0] = wrong
            with pytest.raises(ShapeError, match=f"'{name}' must lie in"):
                running.forward(**{**inputs, name: value})


@layer
def picks(graph, index, again):
    return graph.gather_rows(index, again)


def test_an_index_from_another_layer_is_rejected():
    """Its origin is unknown; gathered next to its use, it is accepted."""
    graph = tw.ComputeGraph("handed on")
    x = graph.input([3, 4], name="x")
    index, again = (graph.input([5], "i32", name=name, storage="scalars") for name in ("index", "again"))
    graph.output(graph.gather_rows(x, picks(graph, index, again, path="layer")), "y")
    with pytest.raises(ShapeError, match="gather it where it is used"):
        graph.plan()


def test_wrong_indices_when_decoding():
    """Positions, slots, sequences, blocks and rows are validated before a kernel uses them."""
    graph = tw.ComputeGraph("decoding")
    models.build_decoding_graph(graph, MODEL, 8, 1, 4, "f32")
    inputs = {
        "tokens": [1, 2],
        "positions": [0, 1],
        "slots": [0, 1],
        "sequence": [0, 0],
        "rows": [1],
        "block_table": [[0, 1]],
    }
    inputs = {name: np.array(value, np.int32) for name, value in inputs.items()}
    with graph.instantiate() as running:
        running.initialize(0)
        running.forward(**inputs)
        for name, value in (
            ("tokens", [600, 0]), ("positions", [0, 128]), ("slots", [0, 256]), ("sequence", [0, 1]),
            ("rows", [2]), ("block_table", [[0, 4]]),
        ):  # fmt: skip
            with pytest.raises(ShapeError, match=name):
                running.forward(**{**inputs, name: np.array(value, np.int32)})


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.weight", "optimizer.velocity.norm.weight"])
def test_a_state_of_another_model_is_rejected(model, name):
    """Of a model with more layers, or of another optimizer; additional tensors were once ignored silently."""
    before = model.state_dict()
    other = {key: value + 1 for key, value in before.items()} | {name: np.ones((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match=f"must be this model's state, and nothing else; got '{name}'"):
        model.load_state_dict(other)
    with pytest.raises(CheckpointError, match=r"got none for 'optimizer.step'"):
        model.load_state_dict({})
    parameters = {key: before[key] + 1 for key in model.parameter_names()}
    with pytest.raises(CheckpointError, match=f"nothing else; got '{name}'"):
        model.load_parameters({**parameters, name: np.ones((2, 2), np.float32)})
    after = model.state_dict()
    assert all(after[key].tobytes() == before[key].tobytes() for key in before)


def test_a_model_without_an_optimizer_has_a_state():
    """Its parameters and a step count of zero; loading gives the same bits."""
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, MODEL, 4, 8, "f32")
    with graph.instantiate() as running:
        running.initialize(3)
        state = running.state_dict()
        assert set(state) == {*running.parameter_names(), "optimizer.step"}
        running.initialize(4)
        assert any(running.get_tensor(n).tobytes() != state[n].tobytes() for n in running.parameter_names())
        running.load_state_dict(state)
        assert all(running.get_tensor(n).tobytes() == state[n].tobytes() for n in running.parameter_names())


def test_every_initial_value_is_generated_once(monkeypatch):
    """Ahead of its writing, on threads; tensors from files need no values."""
    from tilewise.session import instance

    names = []
    generate = instance._random
    monkeypatch.setattr(
        instance, "_random", lambda spec, *args: (names.append(spec.name), generate(spec, *args))[1]
    )
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, MODEL, 4, 8, "f32")
    with graph.instantiate() as running:
        running.initialize(3)
        assert sorted(names) == sorted(running.parameter_names())


def test_each_backward_needs_a_forward(model):
    """Without a forward pass, a second time, or with other weights, gradients would be wrong."""
    batch = batches(MODEL, 1)[0]
    model.forward(**batch)
    model.backward()
    for _ in range(2):
        with pytest.raises(PlanError, match="forward"):
            model.backward()
    model.forward(**batch)
    model.set_tensor("norm.weight", np.ones(64, np.float32))  # its gradient would be of neither value
    with pytest.raises(PlanError, match="forward"):
        model.backward()


def test_closing_frees_memory():
    """A running model uses at most the planned memory, which is freed on close."""
    graph = training_graph(MODEL, "f32", 64, 128)
    plan, batch = graph.plan(), batches(MODEL, 1, 64, 128)[0]
    before = resident_bytes()
    running = graph.instantiate(plan)
    running.initialize(0)
    running.step(batch, 1e-3)
    open_bytes = resident_bytes()
    used = sum(d["total"] for d in plan.estimate_memory_usage())
    assert open_bytes - before < used + (4 << 20)  # Python's own objects
    running.close()
    running.close()
    assert open_bytes - resident_bytes() > used // 2


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_more_memory_than_the_machine_has():
    """A plan that cannot be allocated is rejected with both sizes."""
    graph = tw.ComputeGraph("huge")
    graph.output(graph.scale(graph.parameter([1 << 19, 1 << 19], name="w"), 2.0), "y")
    plan = graph.plan()
    with pytest.raises(ResourceError, match=r"must fit .* GiB; got 2\.00 TiB for 1 device"):
        plan.require_memory()
    with pytest.raises(ResourceError, match="must fit"):
        graph.instantiate(plan)


def logits_and_losses(axes, accumulation, dtype, change=lambda plan: plan):
    graph = training_graph(MODEL, dtype)
    graph.output(graph.draft.tensors[graph.draft.ops[-1].inputs[0]], "logits")
    plan = change(graph.plan(axes, accumulation=accumulation))
    with graph.instantiate(plan) as running:
        running.initialize(0)
        running.step(batches(MODEL, 1)[0], 1e-3)
        return [np.ascontiguousarray(running.get_tensor(name)) for name in ("logits", "loss_rows")]


@cache
def logits_of_one_device(dtype):
    return logits_and_losses({}, 1, dtype)


@pytest.mark.parametrize(
    "axes,accumulation,dtype",
    [({}, 4, "f32"), ({"dp": 2}, 4, "bf16"), ({"tp": 4}, 1, "f32"), ({"dp": 2, "tp": 2}, 2, "bf16")],
    ids=str,
)
def test_logits_of_a_training_step(axes, accumulation, dtype):
    """Read whole after a step; equal to the bit over every mesh and accumulation."""
    one, other = logits_of_one_device(dtype), logits_and_losses(axes, accumulation, dtype)
    assert [x.tobytes() for x in one] == [x.tobytes() for x in other]
    assert all(np.asarray(x, np.float32).reshape(len(x), -1).any(axis=1).all() for x in one)


@pytest.mark.parametrize(
    "axes,accumulation,fault",
    [
        ({}, 4, change_first("linear:mlp.down_proj", merge_splits)),
        ({"tp": 4}, 1, change_first("o_proj.weight/reduce_scatter", drop_partial)),
    ],
    ids=["accumulation", "tp"],
)
def test_logits_of_a_faulty_step_differ(axes, accumulation, fault):
    """The twin: a dropped partial value, or another order of additions, changes logits and losses."""
    one, other = logits_of_one_device("f32"), logits_and_losses(axes, accumulation, "f32", fault)
    assert all(a.tobytes() != b.tobytes() for a, b in zip(one, other))


@pytest.mark.parametrize("rows,index", [(8, 8), (8, -1), (tw.Dim("rows", 2, 8), 2)])
def test_an_invalid_constant_index_is_rejected_when_planned(rows, index):
    """A constant index is validated like an input, for the smallest size."""
    graph = tw.ComputeGraph("picked")
    x = graph.input([rows, 4], name="x")
    chosen = graph.constant(np.array([0, index], np.int32), name="chosen", storage="scalars")
    graph.output(graph.gather_rows(x, chosen), "y")
    with pytest.raises(ShapeError, match="'chosen' must lie in"):
        graph.plan()
