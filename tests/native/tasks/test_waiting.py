"""Waiting for tasks: one, all, any; with threads and asyncio; deadlines; cancelling and failing."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.runtime import (
    LATER,
    InOut,
    Input,
    NoDep,
    Output,
    Runtime,
    TaskExecutionHints,
    TaskGroup,
    WorkerType,
)


def fail(*_):
    raise ValueError("boom")


def test_failure_reaches_successors(runtime):
    """A failure is raised by the wait with its cause, and affects only tasks that read its data."""
    x, y = np.zeros(4), np.zeros(4)
    with runtime.registered(x, y) as (hx, hy):
        bad = runtime.submit(fail, [InOut(hx)])
        after = runtime.submit(None, [Input(hx)])
        other = runtime.submit(None, [InOut(hy)])
        overwritten = runtime.submit("fill", [Output(hx)], scalars=[32, 0])
        later = runtime.submit(None, [Input(hx)])
        with pytest.raises(TaskFailed, match="boom") as caught:
            after.wait()
        assert isinstance(caught.value.__cause__, ValueError) and caught.value.op == "fail"
        assert isinstance(bad.exception(), TaskFailed)
        assert [t.exception() for t in (other, overwritten, later)] == [None] * 3
    with pytest.raises(TaskFailed):
        runtime.wait_all()
    runtime.wait_all()


def test_an_unreported_failure_is_raised_at_the_end():
    """The end of the block raises a failure that the program has not seen, and not one that it has."""
    with pytest.raises(TaskFailed, match="boom"), Runtime(num_workers=1) as rt:
        rt.submit(fail)
    with Runtime(num_workers=1) as rt:
        assert rt.submit(fail).exception() is not None


def test_block_error_cancels():
    """An error in the block is raised unchanged; waiting tasks are skipped."""
    ran = []
    with pytest.raises(KeyError), Runtime(num_workers=1) as rt:
        event = rt.event()
        rt.submit(lambda: ran.append(1), wait_for=[(event, 1)])
        raise KeyError("mine")
    assert not ran


def test_timeout_and_cancel(runtime):
    """A deadline raises TimeoutError; a cancelled task and its successors raise CancelledError."""
    event = runtime.event()
    x = np.zeros(1)
    with runtime.registered(x) as (hx,):
        task = runtime.submit(lambda v: v.fill(1), [InOut(hx)], wait_for=[(event, 2)])
        successor = runtime.submit(None, [Input(hx)])
        with pytest.raises(TimeoutError):
            task.wait(0.02)
        with pytest.raises(TimeoutError):
            runtime.wait_all(0.02)
        with pytest.raises(TimeoutError):
            runtime.read(hx, 0.02)
        task.cancel()
        event.post(2)
        with pytest.raises(CancelledError, match=r"cancelled before it started.*nothing is to be corrected"):
            task.wait()
        assert isinstance(successor.exception(), CancelledError)
    assert x[0] == 0 and event.value == 2


def test_after_and_priority_and_target(runtime):
    """Explicit edges hold; hints are followed if possible."""
    seen = []
    event = runtime.event()
    with runtime.trace() as tracing:
        first = runtime.submit(lambda: seen.append(1), wait_for=[(event, 1)])
        for worker in (1, 0) * 5:
            hints = TaskExecutionHints(target_node=0, target_worker=worker, priority=3, prefetch_inputs=True)
            second = runtime.submit(lambda worker=worker: seen.append(worker), after=[first], hints=hints)
        assert not second.is_complete()
        event.post()
    assert seen[0] == 1 and sorted(seen[1:]) == [0] * 5 + [1] * 5
    assert [task.worker for task in tracing.trace.tasks[1:]] == [1, 0] * 5
    assert {task.priority for task in tracing.trace.tasks[1:]} == {3}


def test_priorities_order_ready_tasks():
    """The most urgent ready task runs first; equal ones run in order of submission."""
    seen = []
    with Runtime(num_workers=0) as rt:
        event = rt.event()
        for number, priority in enumerate((0, 2, -1, 2, 0)):
            hints = TaskExecutionHints(priority=priority)
            rt.submit(lambda number=number: seen.append(number), wait_for=[(event, 1)], hints=hints)
        event.post()
        rt.wait_all()
    assert seen == [1, 3, 0, 4, 2]


def test_predicate(runtime):
    """A predicate of 0 skips the kernel, and the task succeeds."""
    flags, x = np.zeros(2, np.uint32), np.zeros(1)
    with runtime.registered(flags, x) as (hf, hx):
        runtime.submit(lambda v: v.fill(1), [InOut(hx)], predicate=hf).wait()
        assert x[0] == 0
        runtime.write(hf)[0] = 1
        runtime.submit(lambda v: v.fill(1), [InOut(hx)], predicate=hf).wait()
        assert x[0] == 1


def test_worker_types():
    """A type that no worker has is an error; otherwise the task runs on a matching worker."""
    with Runtime(worker_types=[[WorkerType.CUBE], [WorkerType.VECTOR, WorkerType.AI_CPU]]) as rt:
        assert rt.num_workers == 2
        kinds = [WorkerType.CUBE, WorkerType.VECTOR, WorkerType.AI_CPU] * 5
        with rt.trace() as tracing:
            tasks = [rt.submit(None, worker_type=kind) for kind in kinds]
            end = time.monotonic() + 30
            while not all(task.is_complete() for task in tasks) and time.monotonic() < end:
                time.sleep(0.001)  # a wait would help
        for kind, task in zip(kinds, tracing.trace.tasks, strict=True):
            assert task.worker == (0 if kind == WorkerType.CUBE else 1), kind
        with pytest.raises(ValueError, match="none serves"):
            rt.submit(None, worker_type=WorkerType.ACCELERATOR)


def test_later(runtime):
    """A kernel that returns LATER ends when task_complete is called, with its status."""
    begun = threading.Semaphore(0)

    def kernel():
        begun.release()
        return LATER

    tasks = [runtime.submit(kernel) for _ in range(2)]
    for _ in tasks:  # a task that has not begun cannot be ended
        assert begun.acquire(timeout=30)
    assert not tasks[0].is_complete()
    runtime.task_complete(tasks[0])
    runtime.task_complete(tasks[1], 5)
    tasks[0].wait()
    assert isinstance(tasks[1].exception(), TaskFailed)
    with pytest.raises(ValueError, match="ended only once"):
        runtime.task_complete(tasks[0])


@pytest.mark.parametrize("result", [1, 0, True, "LATER", np.ones(2)], ids=repr)
def test_a_python_kernel_returns_none_or_later(runtime, result):
    """Any other return value fails its task."""
    error = runtime.submit(lambda: result).exception(10)
    assert isinstance(error, TaskFailed) and "must return None, or LATER" in str(error)
    assert isinstance(error.__cause__, ConfigError)


def test_later_is_one_object():
    """LATER is recognized by identity, also after a copy, and has a readable repr."""
    assert copy.deepcopy(LATER) is LATER and pickle.loads(pickle.dumps(LATER)) is LATER
    assert repr(LATER) == "LATER" and LATER != 1


def test_dropping_a_handle_never_blocks(runtime):
    """Handles of waiting tasks can be dropped at once; their tasks still run."""
    event, seen = runtime.event(), []
    for n in range(20):
        runtime.submit(lambda n=n: seen.append(n), wait_for=[(event, 1)])
    begin = time.monotonic()
    gc.collect()
    runtime.submit(None, wait_for=[(event, 1)]).detach()
    assert time.monotonic() - begin < 10
    event.post()
    runtime.wait_all()
    assert sorted(seen) == list(range(20))


def test_with_handle_waits(runtime):
    """The end of a handle's block waits."""
    seen = []
    with runtime.submit(lambda: time.sleep(0.02) or seen.append(1)):
        pass
    assert seen


def test_group(runtime):
    """wait_all raises the first failure when all have ended; iteration yields tasks as they complete."""
    event, seen = runtime.event(), []
    group = TaskGroup(runtime.submit(None, wait_for=[(event, n + 1)]) for n in (2, 1, 0))
    order = list(group._tasks)
    for task in group.as_completed() if event.post() is None else ():
        seen.append(task.id)
        event.post()
    assert seen == [t.id for t in reversed(order)] and len(group) == 3
    with pytest.raises(ValueError, match="left to wait for"):
        group.wait_any()
    group.add(runtime.submit(fail))
    assert group.wait_any().exception() is not None
    with pytest.raises(TaskFailed):
        group.wait_all(5)


def test_group_block(runtime):
    """A group's block waits for all; if it raises, tasks that have not started are cancelled."""
    seen = []
    with TaskGroup() as group:
        for n in range(5):
            group.add(runtime.submit(lambda n=n: seen.append(n)))
    assert len(seen) == 5
    event = runtime.event()
    with pytest.raises(KeyError), TaskGroup() as group:
        group.add(runtime.submit(lambda: seen.append(9), wait_for=[(event, 1)]))
        raise KeyError  # no thread will raise the event
    assert 9 not in seen
    with pytest.raises(TimeoutError):
        TaskGroup([runtime.submit(None, wait_for=[(event, 5)])]).wait_any(0.05)
    event.post(5)


def test_group_iterates_in_order(runtime):
    """Iterating gives the tasks in order of addition, any number of times; as_completed gives each once."""
    events = [runtime.event() for _ in range(3)]
    tasks = [runtime.submit(None, wait_for=[(event, 1)]) for event in events]
    group = TaskGroup(tasks)
    assert list(group) == list(group) == tasks
    events[2].post()
    ended = group.as_completed()
    assert next(ended) is tasks[2]
    assert list(group) == tasks
    for event in events:
        event.post()
    assert {task.id for task in ended} == {task.id for task in tasks[:2]}
    assert not list(group.as_completed()) and list(group) == tasks


def test_async_group(runtime):
    """`async with` waits without blocking the thread, raises the first failure, and cancels with its block."""

    async def waits():
        event, seen = runtime.event(), []
        asyncio.get_running_loop().call_later(0.02, event.post)
        async with TaskGroup() as group:
            for n in range(3):
                group.add(runtime.submit(lambda n=n: seen.append(n), wait_for=[(event, 1)]))
        assert sorted(seen) == [0, 1, 2]

    async def fails():
        async with TaskGroup([runtime.submit(fail)]) as group:
            group.add(runtime.submit(None))

    async def raises(group):
        async with group:
            group.add(runtime.submit(None, wait_for=[(runtime.event(), 1)]))
            raise KeyError

    async def is_cancelled(group):
        async with group:
            group.add(runtime.submit(None, wait_for=[(runtime.event(), 1)]))

    asyncio.run(waits())
    with pytest.raises(TaskFailed, match="boom"):
        asyncio.run(fails())
    group = TaskGroup()
    with pytest.raises(KeyError):
        asyncio.run(raises(group))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(is_cancelled(group), 0.05))
    assert [isinstance(task.exception(5), CancelledError) for task in group] == [True, True]


def test_cancelling_an_await_cancels_its_task(runtime):
    """A timeout around `await handle` cancels the task, which then never runs."""
    event, seen = runtime.event(), []
    task = runtime.submit(lambda: seen.append(1), wait_for=[(event, 1)])
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(_await(task), 0.05))
    assert isinstance(task.exception(5), CancelledError)
    event.post()
    runtime.submit(None).wait()
    assert not seen


def test_group_from_several_threads(runtime):
    """Several threads add to and take from one group; each task is returned once."""
    group, taken, lock = TaskGroup(), [], threading.Lock()

    def work(number):
        for _ in range(50):
            group.add(runtime.submit(None))
            task = group.wait_any()
            with lock:
                taken.append(task.id)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    taken += [task.id for task in group.as_completed()]
    assert len(set(taken)) == len(taken) == 200


def test_asyncio(runtime):
    """await a handle, a failing one, many at once, and a group as completed, without blocking a thread."""

    async def main():
        event = runtime.event()
        asyncio.get_running_loop().call_later(0.02, event.post)
        before = set(threading.enumerate())
        assert await runtime.submit(None, wait_for=[(event, 1)]) is None
        with pytest.raises(TaskFailed):
            await runtime.submit(fail)
        tasks = [runtime.submit(lambda x, n=n: x.fill(n), [Output(shape=1)]) for n in range(30)]
        values = await asyncio.gather(*(asyncio.ensure_future(_await(t)) for t in tasks))
        assert [v[0] for v in values] == list(range(30))
        count = 0
        async for task in TaskGroup(tasks + [runtime.submit(None) for _ in range(10)]):
            assert task.is_complete()
            count += 1
        assert count == 40
        # Workers that ran Python are known as dummies; a thread of an earlier test may have ended meanwhile.
        new = set(threading.enumerate()) - before
        assert all(isinstance(thread, threading._DummyThread) for thread in new)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(runtime.submit(None, wait_for=[(event, 9)])), 0.05)
        event.post(9)

    asyncio.run(main())


def test_await_needs_workers():
    """Without workers no thread would run an awaited task: await is rejected, wait() runs it."""
    with Runtime(num_workers=0) as rt:
        task = rt.submit(None)
        with pytest.raises(ValueError, match="needs a worker"):
            asyncio.run(_await(task))
        task.wait()


async def _await(task):
    return await task


def run_python(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


CTRL_C = """
import os, signal, sys, threading, time
from tilewise.runtime import Runtime
signal.signal(signal.SIGINT, signal.default_int_handler)
with Runtime(num_workers=1, window=2) as rt:
    event = rt.event()
    what = sys.argv[1]
    begin = time.monotonic()
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        for _ in range(3 if what == "submit" else 1):
            task = rt.submit(None, wait_for=[(event, 1)])
        task.wait() if what == "wait" else rt.wait_all()
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - begin < 10)
    event.post()
    rt.submit(None).wait()
    print("usable")
"""


@pytest.mark.parametrize("where", ["wait", "wait_all", "submit"])
def test_ctrl_c(where):
    """Ctrl-C ends a wait and a blocked submission with KeyboardInterrupt; the runtime stays usable."""
    done = run_python(CTRL_C, where)
    assert done.stdout.split("\n")[:2] == ["interrupted True", "usable"], done.stderr


def test_signal_handler_exception_is_raised(runtime):
    """An exception of a signal handler during a wait is raised by the wait."""

    class MyError(Exception):
        pass

    def handler(*_):
        raise MyError

    old = signal.signal(signal.SIGALRM, handler)
    event = runtime.event()
    try:
        with pytest.raises(MyError):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            runtime.submit(None, wait_for=[(event, 1)]).wait()
    finally:
        signal.signal(signal.SIGALRM, old)
        event.post()


def test_submit_while_a_replay_waits_for_python():
    """A replay that waits for a Python kernel holds the submission lock; a concurrent submitter lets that run."""
    go = threading.Event()
    with Runtime(num_workers=1, window=4) as rt:
        x, y, z = (rt.register(np.ones(8, np.float32)) for _ in range(3))
        with rt.record() as streamed:
            for _ in range(8):
                rt.submit("sum_f32", [InOut(x), NoDep(y)], scalars=[32])
        rt.wait_all()
        stalls = rt.stats().num_stalls

        def submitter():
            rt.submit(lambda _: go.wait() and None, [InOut(x)])
            streamed.replay()
            rt.wait_all()

        replayer = threading.Thread(target=submitter)
        replayer.start()
        while rt.stats().num_stalls == stalls:  # until it waits for a slot
            time.sleep(0.001)
        go.set()
        rt.submit("sum_f32", [InOut(z), Input(y)], scalars=[32]).wait()
        replayer.join()
        assert rt.read(z)[0] == 2
