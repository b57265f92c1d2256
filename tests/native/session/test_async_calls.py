"""Asynchronous steps and passes: their order, what cancels them, deadlines, groups, asyncio, and the end of a model."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import batches, config, training_graph

from support.blocked_executor import BlockedExecutor
from tilewise.core import NotFinite, PlanError, ShapeError, TaskFailed
from tilewise.runtime import CallHandle, Handle, Runtime, TaskGroup, TaskHandle

MODEL = config(num_hidden_layers=1)
BATCHES = batches(MODEL, 4)
THREAD = "tilewise model"


@cache
def planned():
    graph = training_graph(MODEL, "f32")
    return graph, graph.plan({}, workers_per_device=1)


def opened():
    """A small model, its weights made from a seed."""
    graph, plan = planned()
    model = graph.instantiate(plan)
    model.initialize(0)
    return model


@pytest.fixture
def model():
    with opened() as running:
        yield running


@contextmanager
def blocked(model):
    """In the block, the run of a first call has begun and does not end. Yields its handle and a release."""
    executor = model._executor
    model._executor = BlockedExecutor(executor)
    first = model.step_async(BATCHES[0], 1e-3)
    assert model._executor.entered.wait(60)
    try:
        yield first, model._executor.leave.set
    finally:
        model._executor.leave.set()
        first.exception(60)
        model._executor = executor


def threads():
    """The threads of asynchronous calls that exist now."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def state_of(model):
    return {name: value.tobytes() for name, value in model.state_dict().items()}


# ---- order ------------------------------------------------------------------------------------------------


CALLS = st.lists(
    st.tuples(st.sampled_from(["step", "forward", "backward", "get_tensor"]), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


def call_one(model, kind, number, is_async):
    """One call; returns its result, or a function that waits for it."""
    batch = BATCHES[number]
    if kind == "get_tensor":
        value = model.get_tensor("norm.weight").tobytes()
        return lambda: value
    if not is_async:
        if kind == "step":
            result = model.step(batch, 1e-2)
        elif kind == "forward":
            model.forward(**batch)
            result = {"loss": model.get_tensor("loss")}
        else:
            try:
                model.backward()
            except PlanError as error:
                message = str(error)
                return lambda: message
            result = {"norm.weight.grad": model.get_tensor("norm.weight.grad")}
        return lambda: result
    if kind == "step":
        handle = model.step_async(batch, 1e-2)
    elif kind == "forward":
        handle = model.forward_async(["loss"], **batch)
    else:
        handle = model.backward_async(["norm.weight.grad"])

    def wait():
        error = handle.exception(60)
        return str(error) if error is not None else handle.result()

    return wait


@given(CALLS, st.integers(0, 255))
@settings(max_examples=15)
def test_any_mixture_of_calls_equals_blocking_calls(calls, which):
    """Which of the calls are asynchronous changes no result and no bit of the state."""
    # a failed backward cancels what is queued behind it, so wait for one that may fail
    outcomes = []
    for mask in (0, which):
        with opened() as model:
            waits = []
            for place, (kind, number) in enumerate(calls):
                waits.append(call_one(model, kind, number, bool(mask >> place & 1)))
                if kind == "backward":
                    waits[-1]()
            outcomes.append(([wait() for wait in waits], state_of(model)))
    assert repr(outcomes[0]) == repr(outcomes[1])


def test_a_swap_of_two_steps_is_detected():
    """The twin: the comparison sees another order."""
    states = []
    for order in ((0, 1), (1, 0)):
        with opened() as model:
            for number in order:
                model.step_async(BATCHES[number], 1e-2)
            states.append(state_of(model))
    assert states[0] != states[1]


def test_the_batch_is_copied_while_a_step_runs(model):
    """The call returns during an earlier run; changing the arrays afterwards has no effect."""
    with opened() as other:
        expected = [other.step(batch, 1e-3) for batch in BATCHES[:2]]
    with blocked(model) as (first, release):
        batch = {name: value.copy() for name, value in BATCHES[1].items()}
        second = model.step_async(batch, 1e-3)
        for value in batch.values():
            value[...] = 0
        assert not first.is_complete() and not second.is_complete()
        release()
    assert [first.result(60), second.result(60)] == expected


def test_a_blocking_call_waits_for_asynchronous_ones(model):
    """As a program of PyTorch's, which reads a tensor after it has started kernels."""
    model.forward_async(**BATCHES[0])
    handle = model.forward_async(**BATCHES[1])
    loss = model.get_tensor("loss")
    assert handle.is_complete() and handle.result() == {}
    model.forward(**BATCHES[1])
    assert model.get_tensor("loss") == loss


def test_a_pass_reads_before_the_next_one_runs(model):
    """Each handle has the results of its own pass; a gradient is read before a forward pass reuses its memory."""
    handles = [model.forward_async(["loss"], **batch) for batch in BATCHES]
    losses = [float(handle.result(60)["loss"][0]) for handle in handles]
    assert len(set(losses)) == len(BATCHES)
    model.forward_async(**BATCHES[0])
    gradient = model.backward_async(["norm.weight.grad"])
    model.forward_async(**BATCHES[1]).wait(60)
    assert gradient.result()["norm.weight.grad"].any()


# ---- failures, cancellation, deadlines --------------------------------------------------------------------


def test_mistakes_raise_at_the_call(model):
    """Before anything is queued, in the words of the blocking call."""
    tokens = BATCHES[0]["tokens"]
    wrong = [
        (ShapeError, "missing; pass", lambda: model.step_async({}, 1e-3)),
        (
            ShapeError,
            "shapes must agree",
            lambda: model.step_async({**BATCHES[0], "tokens": tokens[:, 1:]}, 1e-3),
        ),
        (PlanError, "lr must", lambda: model.step_async(BATCHES[0], float("nan"))),
        (PlanError, "on_nonfinite must", lambda: model.step_async(BATCHES[0], 1e-3, on_nonfinite="no")),
        (PlanError, "deadline must be", lambda: model.step_async(BATCHES[0], 1e-3, deadline=0)),
        (ShapeError, "must have the tensor", lambda: model.forward_async(["nonsense"], **BATCHES[0])),
        (PlanError, "read must be a sequence", lambda: model.backward_async("loss")),
    ]
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words):
            call()
    assert not threads()


def test_a_cancelled_step_never_runs(model):
    """Only the cancelled one is skipped; a running one is not affected."""
    with opened() as other:
        expected = [other.step(BATCHES[n], 1e-3) for n in (0, 2)]
        state = state_of(other)
    with blocked(model) as (first, release):
        second, third = (model.step_async(BATCHES[n], 1e-3) for n in (1, 2))
        second.cancel()
        first.cancel()
        assert second.is_complete()
        release()
    with pytest.raises(CancelledError, match="step_async, which was cancelled before it started"):
        second.wait(60)
    assert [first.result(60), third.result(60)] == expected and state_of(model) == state


def test_a_failed_step_cancels_those_behind_it(model):
    """No later batch is trained on; the model runs again afterwards."""
    model.set_tensor("norm.weight", np.full(64, np.inf, np.float32))
    with blocked(model) as (first, release):
        second = model.step_async(BATCHES[1], 1e-3)
        release()
    with pytest.raises(NotFinite):
        first.wait(60)
    with pytest.raises(CancelledError, match=r"because an earlier call failed: .*loss and gradients"):
        second.wait(60)
    assert model.step_count == 0
    model.initialize(0)
    assert model.step_async(BATCHES[0], 1e-3).result(60).loss > 0


def test_a_late_step_fails_and_changes_nothing(model):
    """Its deadline passes while another runs; the step behind it runs."""
    with blocked(model) as (_, release):
        late = model.step_async(BATCHES[1], 1e-3, deadline=1e-9)
        on_time = model.step_async(BATCHES[2], 1e-3, deadline=1e6)
        release()
    with pytest.raises(TaskFailed, match="must start by its deadline; got step_async") as failure:
        late.wait(60)
    assert failure.value.op == "step_async"
    on_time.wait(60)
    assert model.step_count == 2


def test_a_wait_ends_at_its_timeout(model):
    """And the call goes on."""
    late = pytest.raises(TimeoutError, match="must end within the timeout; got step_async")
    with blocked(model) as (first, _), late:
        first.wait(0.01)
    assert first.result(60).loss > 0


def test_failures_of_detached_calls_are_logged(model, caplog):
    """Of those alone; a cancelled one is no failure."""
    model.set_tensor("norm.weight", np.full(64, np.inf, np.float32))
    with caplog.at_level(logging.ERROR, "tilewise"):
        with pytest.raises(NotFinite):
            model.step_async(BATCHES[0], 1e-3).wait(60)
        assert not caplog.records
        with blocked(model) as (first, _):
            first.detach()
            model.step_async(BATCHES[1], 1e-3).detach()
        model.get_tensor("loss")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a detached call of step_async failed"
    ]


# ---- handles of every kind --------------------------------------------------------------------------------


def test_one_group_has_tasks_and_steps(model):
    """In the order in which they end; wait_all raises the first failure."""
    with Runtime(num_workers=1) as runtime:
        event = runtime.event()
        with blocked(model) as (first, release):
            task = runtime.submit(None, wait_for=[(event, 1)])
            quick = runtime.submit(None)
            group = TaskGroup([first, task])
            assert group.add(quick) is quick and list(group) == [first, task, quick]
            assert all(isinstance(handle, Handle) for handle in group)
            assert isinstance(first, CallHandle) and isinstance(task, TaskHandle)
            assert group.wait_any(60) is quick
            with pytest.raises(TimeoutError):
                group.wait_any(0.01)
            event.post()
            assert group.wait_any(60) is task
            release()
            assert group.wait_any(60) is first
        with pytest.raises(ValueError, match="left to wait for"):
            group.wait_any()
        group.wait_all(60)
        model.set_tensor("norm.weight", np.full(64, np.inf, np.float32))
        group.add(model.step_async(BATCHES[0], 1e-3))
        group.add(runtime.submit(None))
        with pytest.raises(NotFinite):
            group.wait_all(60)
        with pytest.raises(ValueError, match="a member of a group must be a Handle"):
            group.add(3)


def test_tasks_of_two_runtimes_are_one_group():
    """Their numbers are equal."""
    with Runtime(num_workers=1) as one, Runtime(num_workers=1) as two:
        tasks = [runtime.submit(None) for runtime in (one, two)]
        assert tasks[0].id == tasks[1].id
        assert {id(task) for task in TaskGroup(tasks).as_completed(60)} == {id(task) for task in tasks}


def test_blocks_wait_or_cancel(model):
    """A block of a handle or group waits at its end; one that raises cancels what has not started."""
    with blocked(model) as (_, release):
        with pytest.raises(KeyError), TaskGroup() as group:
            second = group.add(model.step_async(BATCHES[1], 1e-3))
            raise KeyError
        third = model.step_async(BATCHES[1], 1e-3)
        with pytest.raises(KeyError), third:
            raise KeyError
        release()
    assert [isinstance(h.exception(60), CancelledError) for h in (second, third)] == [True, True]
    with model.step_async(BATCHES[1], 1e-3) as handle:
        pass
    assert handle.is_complete() and model.step_count == 2


def test_steps_in_asyncio(model):
    """`await` gives the result and raises failures; a cancelled wait cancels a step that has not started."""
    with opened() as other:
        expected = [other.step(batch, 1e-3) for batch in BATCHES[:3]]

    async def wait(handle):
        return await handle

    async def main():
        handles = [model.step_async(batch, 1e-3) for batch in BATCHES[:2]]
        results = [await handle for handle in handles]
        async with TaskGroup() as group:
            results.append(await group.add(model.step_async(BATCHES[2], 1e-3)))
        assert [done async for done in TaskGroup(handles)] == handles
        assert results == expected
        with blocked(model) as (first, release):
            second = model.step_async(BATCHES[1], 1e-3)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait(second), 0.01)
            release()
            await first
        with pytest.raises(CancelledError):
            await second
        assert model.step_count == 4

    asyncio.run(main())


def test_a_callback_may_start_calls_but_not_wait_for_them(model):
    """It runs on the thread that runs the calls."""
    outcomes, ended = [], threading.Event()

    def callback():
        outcomes.append(model.step_async(BATCHES[1], 1e-3))
        try:
            model.get_tensor("loss")
        except ValueError as error:
            outcomes.append(str(error))
        ended.set()

    with blocked(model) as (first, _):
        first.notify(callback)
    assert ended.wait(60)
    assert outcomes[0].result(60).loss > 0
    assert "a callback must not wait for other calls of the same object" in outcomes[1]
    with pytest.raises(ValueError, match="a callback must be callable"):
        first.notify(3)


# ---- the end of a model -----------------------------------------------------------------------------------


def test_close_finishes_queued_calls_and_ends_the_thread():
    """No thread is left, and no call is accepted afterwards."""
    model = opened()
    assert not threads()
    handles = [model.step_async(batch, 1e-3) for batch in BATCHES]
    assert len(threads()) == 1
    model.close()
    assert [handle.result(0).loss > 0 for handle in handles] == [True] * len(BATCHES)
    assert not threads()
    for call in (lambda: model.step_async(BATCHES[0], 1e-3), model.backward_async):
        with pytest.raises(PlanError, match="must be open"):
            call()


def test_a_block_that_raises_cancels_queued_calls():
    """The running one ends."""
    model = opened()
    executor = model._executor = BlockedExecutor(model._executor)
    with pytest.raises(KeyError), model:
        first, second = (model.step_async(batch, 1e-3) for batch in BATCHES[:2])
        assert executor.entered.wait(60)
        second.notify(executor.leave.set)  # the end of the block cancels it
        raise KeyError
    assert first.exception(0) is None and isinstance(second.exception(0), CancelledError)
    assert not threads()


def test_a_dropped_model_leaves_no_thread():
    """After its calls have ended, if it was not closed."""
    model = opened()
    model.step_async(BATCHES[0], 1e-3).wait(60)
    (thread,) = threads()
    where = weakref.ref(model)
    del model
    gc.collect()
    assert where() is None
    thread.join(60)
    assert not thread.is_alive()


CHILD = """
import gc, os, sys
import numpy as np
import tilewise as tw

graph = tw.ComputeGraph("twice")
graph.output(graph.scale(graph.input([4, 8], name="x"), 2.0), "y")
models = [graph.instantiate(graph.plan(workers_per_device=1)) for _ in range(2)]
x = np.ones((4, 8), np.float32)
handles = [model.forward_async(["y"], x=x) for model in models]
for handle in handles:
    handle.wait()
for model in models:
    model._alone._calls._changed.acquire()  # as if another thread held it
child = os.fork()
if child == 0:
    try:
        models[0].forward_async(x=x)
    except tw.TilewiseError as error:
        assert "only in the process that made it" in str(error), error
    else:
        os._exit(3)
    assert (handles[0].result()["y"] == 2).all()
    models.pop().close()
    del model
    gc.collect()
    sys.exit(0)
for model in models:
    model._alone._calls._changed.release()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert (models[1].forward_async(["y"], x=3 * x).result()["y"] == 6).all()
sys.exit(status)  # without close: the end of the program ends the threads
"""


def test_a_fork_has_results_and_no_thread():
    """It may read handles that have ended, and drop or close its copies of models; the parent goes on."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
