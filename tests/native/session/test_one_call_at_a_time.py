"""A running model and its callers: threads, forked processes, closing, invalid values."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import batches, config, training_graph

from support.blocked_executor import BlockedExecutor
from tilewise.core import CheckpointError, NotFinite, PlanError, ShapeError

MODEL = config()
BATCH = batches(MODEL, 1)[0]
OTHER = {name: np.roll(value, 5) for name, value in BATCH.items()}


@cache
def planned(dtype="f32", axes=()):
    graph = training_graph(MODEL, dtype)
    return graph, graph.plan(dict(axes))


def opened():
    """A small model on one device, its weights made from a seed."""
    graph, plan = planned()
    with graph.instantiate(plan) as running:
        running.initialize(0)
        yield running


model = pytest.fixture(opened)
unchanged = pytest.fixture(opened, scope="module")  # for tests of calls that change nothing


def state_of(model):
    return {name: value.tobytes() for name, value in model.state_dict().items()}


CALLS = {
    "step": lambda m: m.step(OTHER, 1e-3),
    "forward": lambda m: m.forward(**OTHER),
    "backward": lambda m: m.backward(),
    "set_tensor": lambda m: m.set_tensor("tokens", OTHER["tokens"]),
    "get_tensor": lambda m: m.get_tensor("loss"),
    "initialize": lambda m: m.initialize(1),
    "load_parameters": lambda m: m.load_parameters({}),
    "load_state_dict": lambda m: m.load_state_dict({}),
    "state_dict": lambda m: m.state_dict(),
    "copy_state": lambda m: m.copy_state(),
    "memory_usage": lambda m: m.memory_usage(),
    "timeline": lambda m: m.timeline(),
    "trace": lambda m: m.trace(True),
    "transfers": lambda m: m.transfers(),
    "reset_transfers": lambda m: m.reset_transfers(),
    "differing_replicas": lambda m: m.differing_replicas("norm.weight"),
}


def test_a_second_thread_is_rejected_and_changes_nothing(model):
    """During a step, every call of another thread raises PlanError; the step's result is not affected."""
    before = model.state_dict()
    expected = model.step(BATCH, 1e-3)
    model.load_state_dict(before)
    blocked = model._executor = BlockedExecutor(model._executor)
    results = []
    thread = threading.Thread(target=lambda: results.append(model.step(BATCH, 1e-3)))
    thread.start()
    assert blocked.entered.wait(30)
    for name, call in {**CALLS, "close": lambda m: m.close()}.items():
        with pytest.raises(PlanError, match=rf"\[session.{name}\] a model runs one call at a time"):
            call(model)
    blocked.leave.set()
    thread.join()
    assert results == [expected]
    num_threads = len(os.listdir("/proc/self/task"))
    model.close()  # although the first close was rejected
    blocked.executor.close()
    assert not hasattr(model, "_executor") and len(os.listdir("/proc/self/task")) < num_threads


def test_a_function_runs_during_a_forward_pass(model):
    """It is called once while the model computes, and may not call it; its error is raised after the pass."""
    model.forward(**BATCH)
    expected, errors = model.get_tensor("loss"), []

    def meanwhile():
        with pytest.raises(PlanError, match="a model runs one call at a time") as error:
            model.get_tensor("loss")
        errors.append(error)
        raise ZeroDivisionError

    for inputs, kind in ((OTHER, ZeroDivisionError), ({}, ShapeError), (BATCH, ZeroDivisionError)):
        with pytest.raises(kind):
            model.forward(meanwhile, **inputs)
    assert len(errors) == 2
    assert model.get_tensor("loss") == model.get_tensor("loss", copy=False) == expected
    assert not model.get_tensor("loss", copy=False).flags.writeable


def test_views_equal_copies(unchanged):
    """Of packed weights, inputs and outputs, also during a second run."""
    for batch in (BATCH, OTHER):
        unchanged.forward(**batch)
        for name in ("tokens", "loss", *unchanged.parameter_names()):
            assert np.array_equal(unchanged.get_tensor(name, copy=False), unchanged.get_tensor(name)), name


def test_every_call_on_a_closed_model_is_rejected(model):
    """With the same message; closing again has no effect, and names need no memory."""
    names = model.parameter_names(), model.lasting_names()
    model.close()
    model.close()
    assert names[0] and (model.parameter_names(), model.lasting_names()) == names
    for name, call in CALLS.items():
        with pytest.raises(PlanError, match=rf"\[session.{name}\] the model must be open; got a closed one"):
            call(model)


def test_a_forked_child_is_rejected_at_once(model):
    """The child has no workers: its calls raise an error, and its end does not affect the parent's model."""
    model.step(BATCH, 1e-3)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            model.step(BATCH, 1e-3)
        except PlanError as error:
            code = 0 if "only in the process that made it" in str(error) else 2
        model.close()
        del model
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.isfinite(model.step(BATCH, 1e-3).loss)


def test_invalid_options_of_a_step_are_rejected(unchanged):
    """A rate beyond fp32 changes no weight and counts no step, nor does an unknown word."""
    before = state_of(unchanged)
    with pytest.raises(PlanError, match="lr must"):
        unchanged.step(BATCH, 1e300)
    with pytest.raises(PlanError, match="stop, skip"):
        unchanged.step(BATCH, 1e-3, on_nonfinite="ignore")
    assert state_of(unchanged) == before


@pytest.mark.parametrize("dtype,axes", [("bf16", {}), ("bf16", {"dp": 2}), ("f32", {"tp": 2})], ids=str)
def test_a_step_that_is_not_finite_changes_nothing(dtype, axes):
    """The error names the step and the first tensor that is not finite."""
    graph, plan = planned(dtype, tuple(axes.items()))
    with graph.instantiate(plan) as model:
        model.initialize(0)
        model.step(BATCH, 1e-3)
        bad = model.get_tensor("layers.1.mlp.up_proj.weight")
        bad[3, 4] = np.inf
        model.set_tensor("layers.1.mlp.up_proj.weight", bad)
        before = state_of(model)
        with pytest.raises(NotFinite, match=r"in step 2, first in the weight 'layers.1.mlp.up_proj.weight'"):
            model.step(BATCH, 1e-3)
        assert state_of(model) == before
        result = model.step(BATCH, 1e-3, on_nonfinite="skip")
        assert result.is_skipped and not np.isfinite(result.grad_norm) and model.step_count == 2
        after = state_of(model)
        assert {n for n in after if after[n] != before[n]} == {"optimizer.step"}
        bad[3, 4] = 0.01
        model.set_tensor("layers.1.mlp.up_proj.weight", bad)
        assert not model.step(BATCH, 1e-3).is_skipped and state_of(model) != after


class RequiresGradient:
    """Like a PyTorch tensor that requires a gradient."""

    def __array__(self, *args, **named):
        raise RuntimeError("use tensor.detach().numpy() instead")


@pytest.mark.parametrize(
    "name,value,words",
    [
        ("tokens", np.full((16, 32), 10**8), "must lie in"),
        ("labels", np.full((16, 32), -5), "or be -100"),
        ("tokens", np.zeros((16, 31), np.int32), "shapes must agree"),
        ("tokens", np.zeros((16, 32), np.float32), "must be i32"),
        ("norm.weight", np.ones(64, np.complex64), "must be f32"),
        ("norm.weight", [[1, 2], [3]], "must be an array"),
        ("norm.weight", np.full(64, 1e300), "must fit f32"),
        ("norm.weight", np.ma.masked_less(np.arange(64.0), 3), "must be an array without a mask"),
        ("tokens", [np.ma.masked_less(np.arange(32), 3)] * 16, "must be an array without a mask"),
        ("norm.weight", RequiresGradient(), "must be an array"),
        ("positions", np.zeros((16, 32), np.int32), "a constant"),
        ("loss", np.zeros(1, np.float32), "a result"),
        ("nonsense", np.zeros(1), "must have the tensor"),
    ],
)
def test_a_tensor_is_written_completely_or_not_at_all(unchanged, name, value, words):
    """Indices, shapes, kinds and ranges are checked wherever a value enters."""
    before = state_of(unchanged)
    with pytest.raises((ShapeError, PlanError), match=words):
        unchanged.set_tensor(name, value)
    assert state_of(unchanged) == before


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda w: np.where(np.arange(64) == 5, np.nan, w), "finite"),
        (lambda w: np.where(np.arange(64) == 5, 1e39, w), "finite in"),
        (lambda w: w.astype(np.int32), "floating-point"),
        (lambda w: w[:-1], "shapes must agree"),
    ],
)
def test_invalid_weights_are_rejected_completely(unchanged, change, words):
    """If the last of many is wrong, none is loaded."""
    before = state_of(unchanged)
    wrong = {
        name: value + 1
        for name, value in unchanged.state_dict().items()
        if name in unchanged.parameter_names()
    }
    last = "norm.weight"
    wrong[last] = change(wrong[last].astype(np.float64))
    with pytest.raises(CheckpointError, match=words):
        unchanged.load_parameters(wrong)
    with pytest.raises(CheckpointError, match=words):
        unchanged.load_state_dict({**unchanged.state_dict(), **wrong})
    assert state_of(unchanged) == before


@pytest.mark.parametrize("odd", [-1e-6, np.nan])
def test_second_moments_must_not_be_negative(model, odd):
    """A step takes their roots: a negative one once made a weight NaN in a step that was reported as finite."""
    model.step(BATCH, 1e-3)
    before, name = state_of(model), "optimizer.exp_avg_sq.layers.1.mlp.up_proj.weight"
    wrong = model.get_tensor(name).copy()
    wrong[-1, -1] = odd
    with pytest.raises(ShapeError, match=f"numbers of at least 0; got others in '{name}'"):
        model.set_tensor(name, wrong)
    with pytest.raises(
        CheckpointError, match=f"(numbers of at least 0|finite in f32); got others in '{name}'; nothing was"
    ):
        model.load_state_dict({**model.state_dict(), name: wrong})
    assert state_of(model) == before
    model.set_tensor(
        name.replace("_sq", ""), -np.abs(wrong, where=~np.isnan(wrong), out=np.zeros_like(wrong))
    )
    model.set_tensor(name, np.zeros_like(wrong))
    model.load_state_dict(model.copy_state())


@pytest.mark.parametrize("count", [np.array([-1]), np.array([1.5]), np.array([[1]]), np.array([1 << 60])])
def test_a_step_count_must_be_valid(unchanged, count):
    """An edited or missing one is rejected, and nothing is changed."""
    before = state_of(unchanged)
    with pytest.raises(CheckpointError, match="one count of steps"):
        unchanged.load_state_dict({**unchanged.state_dict(), "optimizer.step": count})
    assert state_of(unchanged) == before


CHILD = """
import os, sys, traceback
import numpy as np
import tilewise as tw

graph = tw.ComputeGraph("twice")
graph.output(graph.scale(graph.input([4, 8], name="x"), 2.0), "y")
model = graph.instantiate(graph.plan(workers_per_device=2))
x = np.ones((4, 8), np.float32)
model.forward(x=x)
child = os.fork()
if child == 0:
    try:
        model._executor.run(model._program, [], "forward")
    except tw.TilewiseError as error:
        assert "forked child" in str(error), error
    else:
        os._exit(3)
    sys.exit(0)  # the interpreter ends, and with it the copies of model and workers
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
model.forward(x=3 * x)
assert (model.get_tensor("y") == 6).all()
model.close()
sys.exit(status)
"""


def test_a_forked_child_ends():
    """Its interpreter destroys the copy of a model without waiting for workers."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
