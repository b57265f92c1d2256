"""Runs over several processes whose group ends: by `close`, or because one of them ends or stops."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import tilewise as tw
from native.distributed.test_group import are_gone, left_open, named_memory, two_processes
from ranks.small_llama import batches, config, training_graph
from tilewise.core import CommTimeout, PeerLost

MODEL = config()
STEP = batches(MODEL, 1)[0]


@pytest.fixture
def group():
    """Two processes; afterwards nothing of them remains."""
    with two_processes() as opened:
        yield opened


def running(axes=None):
    """An initialized instance over some devices, by default two."""
    graph = training_graph(MODEL, "bf16")
    model = graph.instantiate(graph.plan(axes or {"dp": 2}))
    model.initialize(0)
    return model


def state(model):
    """All bits of the state after a step."""
    return {name: value.tobytes() for name, value in model.state_dict().items()}


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
        assert left_open(before) == []


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


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_leader_that_ends_during_a_run(number):
    """Its workers end within two seconds, and nothing of them remains."""
    folder = Path(__file__).parents[2]
    script = TRAINING.format(paths=[str(folder), str(folder / "ranks")])
    leader = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    workers = [int(pid) for pid in leader.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.2)
    assert not any(map(named_memory, (leader.pid, *workers)))
    leader.send_signal(number)
    assert leader.wait(30) != 0
    assert are_gone(workers, 2.0)
    leader.stdout.close()
    leader.stderr.close()
