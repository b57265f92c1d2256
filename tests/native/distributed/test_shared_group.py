"""Runs over two processes: results, figures and errors are those of one process, and the group continues."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from native.distributed.test_device_group import MODEL, STEP, running, state
from native.distributed.test_group import left_open, two_processes
from ranks.small_llama import training_graph
from support.faults import inject
from tilewise.core import PlanError, ResourceError, TaskFailed
from tilewise.core.sizes import format_bytes

pytestmark = pytest.mark.usefixtures("group")


def figures():
    """Tasks, transfers, memory and file traffic of a step on two devices."""
    with running() as model:
        model.trace(True)
        model.reset_transfers()
        model.step(STEP, 1e-3)
        tasks = sorted((task.device, task.kernel, task.row) for task in model.timeline().tasks)
        starts = [task.start_ns for task in model.timeline().tasks]
        assert starts == sorted(starts) and {row[0] for row in tasks} == {0, 1}
        return tasks, model.transfers(), model.memory_usage(), model.file_traffic()


@pytest.fixture(scope="module")
def in_one_process():
    """Result and state of a step, and figures, before the group is opened."""
    with running() as model:
        return (model.step(STEP, 1e-3), state(model)), figures()


@pytest.fixture(scope="module")
def group(in_one_process):
    """Two processes for all tests of this file; afterwards nothing of them remains."""
    with two_processes() as opened:
        yield opened


@pytest.mark.parametrize("device", [0, 1])
def test_a_task_that_fails_in_any_process(in_one_process, device):
    """The error names op, tile, worker and device; later steps have the usual bits."""
    with running() as model:
        inject(model, "throw", device, "attention_backward", 1)
        with pytest.raises(TaskFailed, match="attention_backward") as failure:
            model.step(STEP, 1e-3)
        error = failure.value
        assert (error.op, error.tile, error.device) == ("attention_backward", 1, device) and error.worker >= 0
        model.initialize(0)
        assert (model.step(STEP, 1e-3), state(model)) == in_one_process[0]


def test_figures_cover_all_processes(in_one_process):
    """Bytes, transfers, tasks and timeline equal those of one process with the same devices."""
    tasks, transfers, usage, traffic = figures()
    expected_tasks, expected_transfers, expected_usage, expected_traffic = in_one_process[1]
    assert (tasks, transfers, traffic) == (expected_tasks, expected_transfers, expected_traffic)
    assert [one["parameters"] for one in usage] == [one["parameters"] for one in expected_usage]


def test_several_models_at_once():
    """Each has its own memory and threads; closing one does not affect the others."""
    with running() as first, running({"tp": 2}) as second, running({}) as alone:
        steps = [model.step(STEP, 1e-3) for model in (first, second, alone, first)]
        assert steps[0] == steps[1] == steps[2] != steps[3]
        first.close()
        assert second.step(STEP, 1e-3) == steps[3]


def test_offloaded_state_of_all_processes(tmp_path):
    """A state written and read through the API is the one that steps use; traffic is counted in all processes."""
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2}, offload="optimizer")
    with graph.instantiate(plan, offload_directory=tmp_path) as model:
        model.initialize(0)
        model.step(STEP, 1e-3)
        before = model.state_dict()
        expected = model.step(STEP, 1e-3)
        traffic = model.file_traffic()
        model.load_state_dict(before)
        assert model.step(STEP, 1e-3) == expected
    assert traffic["bytes_read"] > 0 and traffic["bytes_written"] > 0
    assert not list(tmp_path.iterdir())
    with running() as in_memory:
        in_memory.step(STEP, 1e-3)
        assert in_memory.step(STEP, 1e-3) == expected


def test_a_model_without_references(group):
    """A model that was dropped without `close` is closed in all processes when the next one opens."""
    threads = Path(f"/proc/{group.pids[1]}/task")
    first = running()
    num_threads = len(os.listdir(threads))
    del first
    with running():
        assert len(os.listdir(threads)) == num_threads


def test_insufficient_memory():
    """It is rejected with both sizes, and the group continues."""
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2})
    for limit in (1, plan.total_bytes - 1):
        with pytest.raises(ResourceError, match=f"got {format_bytes(plan.total_bytes)} for 2 devices"):
            graph.instantiate(plan, memory_limit_bytes=limit)
    with graph.instantiate(plan, memory_limit_bytes=plan.total_bytes) as model:
        model.initialize(0)
        model.step(STEP, 1e-3)


def test_insufficient_descriptors():
    """For any limit: one kind of error that names it, nothing stays open, and the group continues."""
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2})
    before, limits = left_open(), resource.getrlimit(resource.RLIMIT_NOFILE)
    num_errors = 0
    for more in range(8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(before[0]) + more, limits[1]))
        try:
            graph.instantiate(plan).close()
        except ResourceError as error:
            assert "ulimit -n" in str(error)
            num_errors += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert left_open(before) == []
    assert num_errors
    with graph.instantiate(plan) as model:
        model.initialize(0)
        model.step(STEP, 1e-3)


def test_a_worker_that_cannot_open_a_plan(monkeypatch):
    """The worker's error is raised in the leader, and the group continues."""
    monkeypatch.setattr("tilewise.session.assemble.encode_plan", lambda program: b"tilewise plan 2 nothing")
    with pytest.raises(PlanError, match="a program must be what the leader sent"):
        running()
    monkeypatch.undo()
    with running() as model:
        model.step(STEP, 1e-3)


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c():
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
