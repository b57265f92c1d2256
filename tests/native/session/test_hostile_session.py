"""Wrong values in any argument of planning and running: the project's own errors, before any work."""

from __future__ import annotations

import copy
import pickle
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import batches, config, training_graph

import tilewise as tw
from pure.hostile import HOSTILE, INVALID, accepted
from tilewise.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from tilewise.core import PlanError, TilewiseError
from tilewise.nn import layer, linear
from tilewise.session import verify_strategy

MODEL = config(num_hidden_layers=1)
BATCH = batches(MODEL, 1)[0]
GRAPH = training_graph(MODEL, "f32")
WIDTH = tw.DimLabel("width", 2)


def _instantiate(**options):
    GRAPH.instantiate(**options).close()


@cache
def plan_of_graph():
    return GRAPH.plan()


CALLS = {
    "plan": lambda: (
        GRAPH.plan,
        {
            "mesh": {},
            "accumulation": 1,
            "batch_splits": 4,
            "workers_per_device": 1,
            "sizes": {},
            "recompute": "none",
        },
    ),
    "estimate_memory_usage": lambda: (GRAPH.estimate_memory_usage, {"mesh": {}}),
    "instantiate": lambda: (
        _instantiate,
        {"plan": plan_of_graph(), "memory_limit_bytes": 0, "deadline_s": 60.0},
    ),
    "optimize": lambda: (training_graph(MODEL, "f32").optimize, {"optimizer": GRAPH._optimizer}),
    "set_distribution": lambda: (
        training_graph(MODEL, "f32").set_distribution,
        {"strategy": GRAPH._strategy},
    ),
    "traffic": lambda: (plan_of_graph().traffic, {"program": "step", "sizes": {}}),
    "require_memory": lambda: (plan_of_graph().require_memory, {"limit_bytes": 0}),
}


@pytest.fixture(scope="module")
def model():
    with GRAPH.instantiate() as running:
        running.initialize(0)
        yield running


RUNNING = {
    "step": {"batch": BATCH, "lr": 1e-3, "on_nonfinite": "stop"},
    "initialize": {"seed": 0, "scale": 0.02},
    "get_tensor": {"name": "norm.weight"},
    "set_tensor": {"name": "norm.weight", "value": np.ones(64, np.float32)},
    "load_parameters": {"source": {}},
    "load_state_dict": {"state": {}},
    "differing_replicas": {"name": "norm.weight"},
    "trace": {"enable": False},
    "forward": dict(BATCH),
}


TAKEN: dict[str, dict[str, set[str]]] = {  # besides what an argument is meant to be
    "plan": {
        "mesh": {"None", "{}"},
        "accumulation": {"None"},
        "batch_splits": {"None"},
        "workers_per_device": {"None"},
        "sizes": {"None", "{}"},
        "recompute": {"()", "[]"},
    },
    "estimate_memory_usage": {"mesh": {"None", "{}"}},
    "instantiate": {"plan": {"None"}, "memory_limit_bytes": {"0"}, "deadline_s": {"2.5", "float32"}},
    "require_memory": {"limit_bytes": {"0"}},
    "traffic": {"sizes": {"None", "{}"}},
    "step": {"lr": {"0", "2**70"}},
    "initialize": {"seed": {"0"}, "scale": {"0", "2.5", "2**70", "float32"}},
    "trace": {"enable": {"True"}},
}


@pytest.mark.parametrize("name", CALLS)
def test_planning_rejects_with_our_errors(name):
    """Every argument of every call before a run; the table has the accepted values."""
    assert accepted(*CALLS[name]()) == TAKEN.get(name, {})


def state_of(model):
    return {name: value.tobytes() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", RUNNING)
def test_running_rejects_with_our_errors(model, name):
    """Every argument of every call on a running model; a rejected call changes no weight."""
    right = {
        "load_parameters": lambda: {"source": {n: model.get_tensor(n) for n in model.parameter_names()}},
        "load_state_dict": lambda: {"state": model.state_dict()},
    }
    arguments = right[name]() if name in right else RUNNING[name]
    getattr(model, name)(**arguments)
    taken: dict[str, set[str]] = {}
    before = state_of(model)
    for argument in arguments:
        for label, value in HOSTILE.items():
            try:
                getattr(model, name)(**{**arguments, argument: value})
            except INVALID:
                assert state_of(model) == before, (argument, label)
            else:
                taken.setdefault(argument, set()).add(label)
                before = state_of(model)
    assert taken == TAKEN.get(name, {})


def test_comparing_strategies_rejects_with_our_errors(monkeypatch):
    """An invalid mesh, batch or rate is named before two models are allocated."""
    monkeypatch.setattr(type(GRAPH), "instantiate", lambda *_, **__: pytest.fail("a model was allocated"))
    arguments = {
        "graph": GRAPH,
        "mesh": {"dp": 2},
        "batches": [BATCH],
        "accumulation": 1,
        "seed": 0,
        "lr": 1e-3,
    }
    arguments["recompute"] = "full"
    for argument, value in (
        ("mesh", {"dp": 0}), ("batches", []),
        ("accumulation", -1), ("seed", -1), ("lr", float("nan")), ("recompute", 3),
    ):  # fmt: skip
        with pytest.raises(TilewiseError):
            verify_strategy(**{**arguments, argument: value})


def test_comparing_strategies_keeps_a_graphs_strategy():
    """For any strategy and any end of the comparison; it was once lost, or affected the plan for one device."""
    graph = training_graph(MODEL, "f32")
    for own in (tw.DistributionStrategy.ddp(2), tw.DistributionStrategy.fsdp(2)):
        graph.set_distribution(own)
        assert verify_strategy(graph, {"fsdp": 2}, [BATCH]).equal
        with pytest.raises(TilewiseError, match="parts of a sum"):
            verify_strategy(graph, {"dp": 3}, [BATCH])
        assert graph.distribution == own


def test_numpy_integers_are_accepted_by_planning():
    """Accumulation, batch splits, workers and sizes of axes."""
    plain = GRAPH.plan({"dp": 2}, accumulation=2, batch_splits=8, workers_per_device=1)
    two, eight, one = np.int64(2), np.uint8(8), np.int64(1)
    plan = GRAPH.plan({"dp": two}, accumulation=two, batch_splits=eight, workers_per_device=one)
    assert plan.explain() == plain.explain() and plan.settings == plain.settings


def graph_of(
    *,
    first="w",
    k_splits=8,
    batch=8,
    width=6,
    label=WIDTH,
    dtype="f32",
    layers=1,
    scale=2.0,
    kind="input",
    init="normal",
    bias=False,
    output="y",
    activation="relu",
    loss="mean",
    name="g",
    optimizer=tw.optim.SGD(),  # noqa: B008  # it never changes
):
    g = tw.ComputeGraph(name, k_splits=k_splits)
    x = g.input([batch, 4], name="x", labels=[tw.BATCH, None])
    y = linear(g, x if dtype == "f32" else g.cast(x, dtype), first, width, out_label=label)
    for n in range(1, layers):
        y = linear(g, g.relu(y), f"w{n}", width)
    weight = getattr(g, kind)([8, width], name="kept")
    g.output(getattr(g, activation)(weight), "of_kept")
    c = g.constant(np.full((width,), scale, np.float32), name="c", storage="vector")
    y = g.add_bias(y if dtype == "f32" else g.cast(y, "f32"), c)
    if bias:
        y = g.add_bias(y, g.parameter([width], name="b", init=init))
    g.output(y, output)
    g.loss(getattr(g, loss)(y))
    if optimizer is not None:
        g.optimize(optimizer)
    return g


@cache
def plan_of_one():
    return graph_of().plan()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 16}, r"input 'x' f32\[8, 4\], which is f32\[16, 4\] in 'g'"),
        ({"width": 12}, r"parameter 'w' f32\[6, 4\], which is f32\[12, 4\]"),
        ({"label": None}, "parameter 'w' of labels "),
        ({"label": tw.DimLabel("width", 3)}, "parameter 'w' of labels "),
        ({"dtype": "bf16"}, r"parameter 'w' f32\[6, 4\], which is bf16\[6, 4\]"),
        ({"layers": 2}, r"no 'w1', which is parameter f32\[6, 6\] in 'g'"),
        ({"scale": 3.0}, "constant 'c' of other values than in 'g'"),
        ({"kind": "state"}, "input 'kept', which is state in 'g'"),
        ({"bias": True}, "no 'b', which is parameter"),
        ({"first": "v"}, r"parameter 'w' f32\[6, 4\], absent in 'g'"),
        ({"output": "z"}, r"output 'y' f32\[8, 6\], absent in 'g'"),
        ({"k_splits": 4}, "k_splits=8, which is 4 in 'g'"),
        ({"optimizer": None}, r"optimizer SGD.*, which is None in 'g'"),
        ({"optimizer": tw.optim.SGD(momentum=0.5)}, "optimizer SGD of momentum 0.9, which is 0.5"),
        ({"optimizer": tw.optim.AdamW()}, "optimizer SGD.*, which is AdamW"),
        ({"activation": "silu"}, "other ops, symbols or loss than in 'g'"),
        ({"loss": "sum"}, "other ops, symbols or loss than in 'g'"),
    ],
    ids=str,
)
def test_a_plan_of_another_graph_is_rejected(change, words):
    """A difference in anything that affects bits is named: the plan would otherwise run silently."""
    one, other = graph_of(), graph_of(**change)
    with pytest.raises(PlanError, match=f"a plan must be one of this graph; got that of 'g' with {words}"):
        other.instantiate(plan_of_one())
    with pytest.raises(PlanError, match="a plan must be one of this graph"):
        one.instantiate(other.plan())


def test_a_plan_fits_an_equal_computation(tmp_path):
    """With other names and layouts, and read from a file."""
    graph_of(name="other").plan({"dp": 2}).save(tmp_path / "plan")
    with graph_of().instantiate(tw.Plan.load(tmp_path / "plan")) as model:
        assert model.parameter_names() == ["w"]


def test_initial_values_are_finite(model):
    """A standard deviation beyond fp32 is rejected; the largest accepted one gives finite numbers."""
    for scale in (3.4e38, 1e38):
        with pytest.raises(PlanError, match="scale must lie in"):
            model.initialize(0, scale)
    model.initialize(0, 2e37)
    tensor = model.get_tensor("layers.0.mlp.up_proj.weight")
    assert np.isfinite(tensor).all() and np.abs(tensor).max() > 1e37
    model.initialize(0)


def test_initial_values_are_the_graphs():
    """A plan must have the graph's `initialize` settings."""
    with pytest.raises(PlanError, match="parameter 'b' of init 'normal', which is 'zeros'"):
        graph_of(bias=True, init="zeros").instantiate(graph_of(bias=True).plan())


@layer
def block(graph, x):
    return linear(graph, graph.relu(x), "w", 64)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"accumulation": 2}),
        ({"fsdp": 2}, {}),
        ({}, {"recompute": "full", "checkpoints": True}),
        ({}, {"offload": ("optimizer", "parameters")}),
    ],
    ids=str,
)
def test_plans_of_an_equal_graph_are_accepted(tmp_path, axes, options):
    """Planned with any settings, read from a file, sent to another process or copied."""

    def build():
        g = tw.ComputeGraph("g")
        x = g.input([8, 64], name="x", labels=[tw.BATCH, None])
        for n in range(3):
            x = block(g, x, path=f"layers.{n}")
        g.loss(g.mean(x))
        g.optimize(tw.optim.AdamW(groups=(tw.optim.ParameterGroup("layers.1.w", lr=0.5),)))
        return g

    graph = build()
    plan = graph.plan(axes, **options)
    plan.save(tmp_path / "a.plan")
    graph.save(tmp_path / "a.graph")
    loaded = tw.ComputeGraph.load(tmp_path / "a.graph")
    loaded.optimize(tw.optim.AdamW(groups=(tw.optim.ParameterGroup("layers.1.w", lr=0.5),)))
    for own in (graph, build(), loaded):
        own.instantiate(plan).close()
        own.instantiate(tw.Plan.load(tmp_path / "a.plan")).close()
    for same in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert same.digest() == plan.digest() and same == plan
        graph.instantiate(same).close()


def hinted(hints):
    @layer
    def one(graph, x, *, hint=None):
        """A layer whose attribute sets only its layout."""
        y = linear(graph, x, "w", 64)
        return graph.relu(y if hint is None else graph.constrain(y, hint))

    g = tw.ComputeGraph("hinted")
    x = g.input([8, 64], name="x", labels=[tw.BATCH, None])
    for number, hint in enumerate(hints):
        x = one(g, x, path=f"layers.{number}", **({} if hint is None else {"hint": hint}))
    g.loss(g.mean(linear(g, x, "head", 32, out_label=tw.DimLabel("mlp"))))
    g.optimize(tw.optim.AdamW())
    return g


HINTS = [(None,) * 3, (("dp", "tp"),) * 3, (None, ("dp", "tp"), ("dp",))]


def test_layout_hints_are_not_part_of_the_computation(tmp_path):
    """Plans and checkpoints fit a graph with other hints in all or some layers, and every bit is equal."""
    data = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    plans = [hinted(hints).plan({"dp": 2, "tp": 2}, batch_splits=4) for hints in HINTS]
    assert len({plan.digest() for plan in plans}) == 3 and len({plan.definition for plan in plans}) == 1
    with hinted(HINTS[0]).instantiate(plans[0]) as model:
        model.initialize(seed=0)
        model.step({"x": data}, lr=0.01)
        saved = save_checkpoint(tmp_path, TrainingState(1, model.copy_state(), mesh={"dp": 2, "tp": 2}), {})
    seen = set()
    for plan in plans:
        plan.save(tmp_path / "hinted.plan")
        with hinted(HINTS[0]).instantiate(tw.Plan.load(tmp_path / "hinted.plan")) as model:
            model.load_state_dict(load_checkpoint(saved, {}).tensors)
            result = model.step({"x": data}, lr=0.01)
            weights = [model.get_tensor(name).tobytes() for name in model.parameter_names()]
            seen.add((result.loss, result.grad_norm, *weights))
    assert len(seen) == 1
    other = hinted(HINTS[0]).digest()
    assert hinted(HINTS[1]).digest() != other == hinted(HINTS[0]).digest()


def test_sizes_fixed_by_a_plan_are_within_the_graphs_bounds():
    """One number per symbol, in its bounds."""

    def build(high=8, *names):
        g = tw.ComputeGraph("g")
        for at, name in enumerate(names or ("n", "n")):
            g.output(g.relu(g.input([tw.Dim(name, 2, high), 4], name=f"x{at}")), f"y{at}")
        return g

    build().instantiate(build().plan(sizes={"n": 4})).close()
    with pytest.raises(PlanError, match="got that of 'g' with other ops, symbols or loss than in 'g'"):
        build().instantiate(build(8, "n", "m").plan(sizes={"n": 4, "m": 4}))
    for odd in (
        build(8, "n", "m").plan(sizes={"n": 4, "m": 5}),
        build(16).plan(sizes={"n": 16}),
        build(16).plan(),
        build(8, "m", "m").plan(),
    ):
        with pytest.raises(PlanError, match="a plan must be one of this graph; got that of 'g' with input"):
            build().instantiate(odd)
