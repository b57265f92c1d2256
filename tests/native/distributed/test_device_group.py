"""Runs over several processes: errors are reported as in one process, and the end of one process ends the run."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from native.distributed.test_group import are_gone, left_open, shared_names
from ranks.small_llama import batches, config, training_graph
from support.faults import inject
from tilewise.core import CommTimeout, PeerLost, PlanError, ResourceError, TaskFailed
from tilewise.core.sizes import format_bytes

MODEL = config()
STEP = batches(MODEL, 1)[0]


@pytest.fixture
def group():
    """Two processes; afterwards nothing of them remains."""
    before = left_open()
    with tw.ProcessGroup(2) as opened:
        opened.start()
        workers = opened.pids[1:]
        yield opened
    assert are_gone(workers, 0) and left_open() == before


def running(axes=None, **options):
    """An initialized instance over some devices."""
    graph = training_graph(MODEL, "bf16")
    model = graph.instantiate(graph.plan(axes or {"dp": 2}), **options)
    model.initialize(0)
    return model


def state(model):
    """All bits of the state after a step."""
    return {name: value.tobytes() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("device", [0, 1])
def test_a_task_that_fails_in_any_process(group, device):
    """The error names op, tile, worker and device; later steps have the usual bits."""
    with running() as model:
        inject(model, "throw", device, "attention_backward", 1)
        with pytest.raises(TaskFailed, match="attention_backward") as failure:
            model.step(STEP, 1e-3)
        error = failure.value
        assert (error.op, error.tile, error.device) == ("attention_backward", 1, device) and error.worker >= 0
        model.initialize(0)
        again = model.step(STEP, 1e-3), state(model)
    group.close()
    with running() as model:
        assert again == (model.step(STEP, 1e-3), state(model))


def test_figures_cover_all_processes(group):
    """Bytes, transfers, tasks and timeline equal those of one process with the same devices."""

    def figures():
        with running() as model:
            model.trace(True)
            model.reset_transfers()
            model.step(STEP, 1e-3)
            tasks = sorted((task.device, task.kernel, task.row) for task in model.timeline().tasks)
            starts = [task.start_ns for task in model.timeline().tasks]
            assert starts == sorted(starts) and {row[0] for row in tasks} == {0, 1}
            return tasks, model.transfers(), model.memory_usage(), model.file_traffic()

    result = figures()
    group.close()
    expected = figures()
    assert result[:2] == expected[:2] and result[3] == expected[3]
    assert [usage["parameters"] for usage in result[2]] == [usage["parameters"] for usage in expected[2]]


def test_several_models_at_once(group):
    """Each has its own memory and threads; closing one does not affect the others."""
    with running() as first, running({"tp": 2}) as second, running({}) as alone:
        steps = [model.step(STEP, 1e-3) for model in (first, second, alone, first)]
        assert steps[0] == steps[1] == steps[2] != steps[3]
        first.close()
        assert second.step(STEP, 1e-3) == steps[3]


def test_offloaded_state_of_all_processes(group, tmp_path):
    """A state written and read through the API is the one that steps use; traffic is counted in all processes."""
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2}, offload="optimizer")
    with graph.instantiate(plan, offload_directory=tmp_path) as model:
        model.initialize(0)
        model.step(STEP, 1e-3)
        state = model.state_dict()
        expected = model.step(STEP, 1e-3)
        traffic = model.file_traffic()
        model.load_state_dict(state)
        assert model.step(STEP, 1e-3) == expected
    assert traffic["bytes_read"] > 0 and traffic["bytes_written"] > 0
    assert not list(tmp_path.iterdir())
    with running() as in_memory:
        in_memory.step(STEP, 1e-3)
        assert in_memory.step(STEP, 1e-3) == expected


def test_a_closed_group_does_not_run(group):
    """Its models raise an error; their tensors can still be read, and they can be closed."""
    with running() as model:
        before = state(model)
        group.close()
        with pytest.raises(PeerLost, match="got a closed one"):
            model.step(STEP, 1e-3)
        assert state(model) == before


def killed_during_steps(group, number):
    """Kill a worker during steps; returns the error and its delay."""
    with running() as model:
        model.step(STEP, 1e-3)
        sent = []

        def send():
            sent.append(time.monotonic())
            os.kill(group.pids[1], number)

        timer = threading.Timer(0.3, send)
        timer.start()
        with pytest.raises((PeerLost, CommTimeout)) as failure:
            while not sent or time.monotonic() < sent[0] + 60:
                model.step(STEP, 1e-3)
        timer.join()
        took = time.monotonic() - sent[0]
        with pytest.raises(PeerLost):
            model.step(STEP, 1e-3)
    return failure.value, took


def test_a_worker_killed_during_a_run(group):
    """One error within seconds that names the process, how it ended, and its current call."""
    worker = group.pids[1]
    error, took = killed_during_steps(group, signal.SIGKILL)
    assert isinstance(error, PeerLost) and took < 5
    assert f"process 1 (pid {worker})" in str(error) and "signal 9" in str(error)
    assert "after 0 tasks" not in str(error)  # though each of its runs was short


def steps_until_the_end(model, ends):
    """The function of a thread: steps and reads until an error."""
    try:
        while True:
            model.step(STEP, 1e-3)
            model.transfers()
    except Exception as error:
        ends.append((time.monotonic(), error))


def killed_at(moment, number):
    """Two models in two threads over three processes, one of which is killed; returns the threads'
    errors and times.
    """
    graph, ends, killed = training_graph(MODEL, "bf16"), [], []
    plan = graph.plan({"dp": 4}, workers_per_device=1)
    with tw.ProcessGroup(3) as group:
        group.start()
        pid = group.pids[number]

        def kill():
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(moment, kill)
        timer.start()
        with ExitStack() as opened:
            try:
                models = [opened.enter_context(graph.instantiate(plan)) for _ in range(2)]
                for model in models:
                    model.initialize(0)
                threads = [threading.Thread(target=steps_until_the_end, args=(m, ends)) for m in models]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
            except PeerLost as error:
                ends = [(time.monotonic(), error)] * 2
            timer.join()
    return pid, killed[0], ends


@pytest.mark.slow
def test_a_worker_killed_at_any_moment():
    """While models are opened, initialized, run or read: every caller gets an error soon, and nothing remains."""
    before = left_open()
    moments = random.Random(0)
    for round_ in range(12):
        pid, killed, ends = killed_at(moments.random() * 0.5, 1 + round_ % 2)
        assert len(ends) == 2
        for reported, error in ends:
            assert isinstance(error, PeerLost) and reported - killed < 5
        assert any(f"pid {pid}" in str(error) for _, error in ends)
        assert left_open() == before


TRAINING = """
import os, sys, time
sys.path[:0] = {paths!r}
import tilewise as tw
from ranks.small_llama import batches, config, training_graph
with tw.ProcessGroup(3) as group:
    graph = training_graph(config(), "bf16")
    with graph.instantiate(graph.plan({{"dp": 4}})) as model:
        model.initialize(0)
        batch = batches(config(), 1)[0]
        model.step(batch, 1e-3)
        print(*group.pids[1:], flush=True)
        while True:
            model.step(batch, 1e-3)
"""


@pytest.mark.slow
def test_a_worker_stopped_during_a_run(group):
    """After five seconds without a sign of life: one error that names it, and its end."""
    worker = group.pids[1]
    error, took = killed_during_steps(group, signal.SIGSTOP)
    assert f"process 1 (pid {worker}), which has not responded" in str(error) and took < 15


@pytest.mark.slow
def test_a_paused_leader(group):
    """Ctrl-Z and `fg`: the run continues, however long the pause."""
    with running() as model:
        for seconds in (0.01, 6.0):
            stop = f"sleep 0.1; kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
            with subprocess.Popen(["sh", "-c", stop]) as stopping:
                while stopping.poll() is None:
                    model.step(STEP, 1e-3)
            model.step(STEP, 1e-3)


def test_a_model_without_references(group):
    """A model that was dropped without `close` is closed in all processes when the next one opens."""
    first = running()
    threads = count_threads(group.pids[1])
    del first
    with running():
        assert count_threads(group.pids[1]) == threads


def count_threads(pid):
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def test_insufficient_memory(group):
    """It is rejected with both sizes, and the group continues."""
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2})
    for limit in (1, 2 * plan.device_bytes - 1):
        with pytest.raises(ResourceError, match=f"got {format_bytes(2 * plan.device_bytes)} for 2 devices"):
            graph.instantiate(plan, memory_limit_bytes=limit)
    with graph.instantiate(plan, memory_limit_bytes=2 * plan.device_bytes) as model:
        model.initialize(0)
        model.step(STEP, 1e-3)


def test_insufficient_descriptors(group):
    """For any limit: one kind of error that names it, nothing stays open, and the group continues."""
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2})
    before, limits = left_open(), resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = 0
    for more in range(8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(before[0]) + more, limits[1]))
        try:
            graph.instantiate(plan).close()
        except ResourceError as error:
            assert "ulimit -n" in str(error)
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert left_open() == before
    assert refused
    with graph.instantiate(plan) as model:
        model.initialize(0)
        model.step(STEP, 1e-3)


def test_a_worker_that_cannot_open_a_plan(group, monkeypatch):
    """The worker's error is raised in the leader, and the group continues."""
    monkeypatch.setattr("tilewise.session.assemble.encode_plan", lambda program: b"tilewise plan 2 nothing")
    with pytest.raises(PlanError, match="a program must be what the leader sent"):
        running()
    monkeypatch.undo()
    with running() as model:
        model.step(STEP, 1e-3)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_leader_that_ends_during_a_run(number):
    """Its workers end within two seconds, and nothing of them remains."""
    shared = shared_names()
    folder = Path(__file__).parents[2]
    script = TRAINING.format(paths=[str(folder), str(folder / "ranks")])
    leader = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    workers = [int(pid) for pid in leader.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.2)
    leader.send_signal(number)
    assert leader.wait(30) != 0
    assert are_gone(workers, 2.0)
    assert shared_names() == shared
    leader.stdout.close()
    leader.stderr.close()


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c(group):
    """KeyboardInterrupt is raised quickly during steps, and the model still runs afterwards."""
    with running() as model:
        expected = model.step(STEP, 1e-3)
        timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        until = time.monotonic() + 60
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() < until:
                model.step(STEP, 1e-3)
        timer.join()
        model.initialize(0)
        model.load_state_dict(model.state_dict())
        assert np.isfinite(model.step(STEP, 1e-3).loss) and np.isfinite(expected.loss)
