"""Wrong values in any argument of planning, instantiating and running: the project's own errors, before any work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import batches, config, training_graph

import tilewise as tw
from pure.hostile import HOSTILE, accepted
from tilewise.core import PlanError, TilewiseError
from tilewise.nn import linear
from tilewise.session import verify_strategy

MODEL = config(num_hidden_layers=1)
BATCH = batches(MODEL, 1)[0]
GRAPH = training_graph(MODEL, "f32")


def _instantiate(**given):
    GRAPH.instantiate(**given).close()


CALLS = {
    "plan": (
        GRAPH.plan,
        {
            "mesh": {},
            "accumulation": 1,
            "leaves": 4,
            "workers_per_device": 1,
            "sizes": {},
            "strict": False,
            "checkpoints": False,
            "recompute": "none",
        },
    ),
    "estimate_memory_usage": (GRAPH.estimate_memory_usage, {"mesh": {}}),
    "instantiate": (_instantiate, {"plan": GRAPH.plan(), "memory_limit_bytes": 0, "deadline_s": 60.0}),
    "optimize": (training_graph(MODEL, "f32").optimize, {"optimizer": GRAPH._optimizer}),
    "set_distribution": (training_graph(MODEL, "f32").set_distribution, {"strategy": GRAPH._strategy}),
    "why": (GRAPH.plan().why, {"name": "norm.weight"}),
    "traffic": (GRAPH.plan().traffic, {"program": "step", "sizes": {}}),
    "require_memory": (GRAPH.plan().require_memory, {"limit_bytes": 0}),
}


@pytest.fixture(scope="module")
def model():
    """A small model on one device."""
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
    "inject": {"kind": "throw", "device": 0, "label": "nothing", "index": 0},
    "forward": dict(BATCH),
}


TAKEN: dict[str, dict[str, set[str]]] = {  # besides what an argument is meant to be
    "plan": {
        "mesh": {"None", "{}"},
        "leaves": {"None"},
        "workers_per_device": {"None"},
        "sizes": {"None", "{}"},
        "strict": {"True"},
        "checkpoints": {"True"},
        "recompute": {"()", "[]"},
    },
    "estimate_memory_usage": {"mesh": {"None", "{}"}},
    "instantiate": {"plan": {"None"}, "memory_limit_bytes": {"0"}, "deadline_s": {"2.5", "float32"}},
    "require_memory": {"limit_bytes": {"0"}},
    "traffic": {"sizes": {"None", "{}"}},
    "step": {"lr": {"0", "2**70"}},
    "initialize": {"seed": {"0"}, "scale": {"0", "2.5", "2**70", "float32"}},
    "trace": {"enable": {"True"}},
    "inject": {"device": {"0"}, "label": {"'name'"}, "index": {"0"}},
}


@pytest.mark.parametrize("name", CALLS)
def test_planning_refuses_in_its_own_words(name):
    """Every argument of every call before a run; what is taken stands in the table."""
    assert accepted(*CALLS[name]) == TAKEN.get(name, {})


@pytest.mark.parametrize("name", RUNNING)
def test_running_refuses_in_its_own_words(model, name):
    """Every argument of every call on a running model; a refused one changes no weight."""
    right = {
        "load_parameters": lambda: {"source": {n: model.get_tensor(n) for n in model.parameter_names()}},
        "load_state_dict": lambda: {"state": model.state_dict()},
    }
    given = right[name]() if name in right else RUNNING[name]
    getattr(model, name)(**given)
    taken: dict[str, set[str]] = {}
    for argument in given:
        for label, value in HOSTILE.items():
            before = {n: v.tobytes() for n, v in model.state_dict().items()}
            try:
                getattr(model, name)(**{**given, argument: value})
            except TilewiseError:
                after = {n: v.tobytes() for n, v in model.state_dict().items()}
                assert after == before, (argument, label)
            else:
                taken.setdefault(argument, set()).add(label)
    assert taken == TAKEN.get(name, {})


def test_comparing_strategies_refuses_in_its_own_words(monkeypatch):
    """A mesh, batches or a rate that are none are named before two models are allocated."""
    monkeypatch.setattr(type(GRAPH), "instantiate", lambda *_, **__: pytest.fail("a model was allocated"))
    given = {"graph": GRAPH, "mesh": {"dp": 2}, "batches": [BATCH], "accumulation": 1, "seed": 0, "lr": 1e-3}
    given["recompute"] = "full"
    for argument in given:
        for value in (None, -1, "x", float("nan"), object(), [3]):
            with pytest.raises(TilewiseError):
                verify_strategy(**{**given, argument: value})
    for argument in ("report", "change"):
        with pytest.raises(TilewiseError, match=argument):
            verify_strategy(**given, **{argument: 3})


def test_integers_of_numpy_plan_what_integers_plan():
    """Accumulation, leaves, workers and sizes of axes may come out of arrays."""
    plain = GRAPH.plan({"dp": 2}, accumulation=2, leaves=8, workers_per_device=1)
    for kind in (np.int64, np.uint8):
        two, eight, one = (kind(n) for n in (2, 8, 1))
        plan = GRAPH.plan({"dp": two}, accumulation=two, leaves=eight, workers_per_device=one)
        assert plan.explain() == plain.explain() and plan.settings == plain.settings


def test_a_plan_of_another_graph_is_refused():
    """A plan runs as what it was made of; a graph takes only its own, also after a file."""

    def graph_with(name):
        g = tw.ComputeGraph(name)
        x = g.input([4, 8], name="x", labels=[tw.BATCH, None])
        g.loss(g.mean(linear(g, x, f"{name}.weight", 8)))
        return g

    one, other = graph_with("one"), graph_with("other")
    with pytest.raises(
        PlanError, match=r"plan must be one of this graph; got that of 'other' with parameter"
    ):
        one.instantiate(other.plan({}))
    one.instantiate(one.plan({})).close()
