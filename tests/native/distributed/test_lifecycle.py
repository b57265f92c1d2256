"""`init` and `shutdown`: in one process, under a launcher, repeated, in a fork, and when something cannot be closed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import tilewise as tw
from native.distributed.test_mpi_commands import MPIEXEC, script
from native.serve.serving_models import save_model
from tilewise.core import ConfigError, PlanError, open_objects
from tilewise.core.open_objects import close_all, note_open
from tilewise.runtime import Runtime


@pytest.fixture(autouse=True)
def _ended(monkeypatch):
    """Tests begin and end without open objects, and do not close those of other tests."""
    monkeypatch.setattr(open_objects, "_open", weakref.WeakValueDictionary())
    yield
    tw.shutdown()


def small_model(mesh=None):
    """Doubles a matrix."""
    graph = tw.ComputeGraph("twice")
    x = graph.input([4, 8], name="x", labels=[tw.BATCH, None])
    graph.output(graph.scale(x, 2.0), "y")
    return graph.instantiate(graph.plan(mesh or {}, workers_per_device=1))


def test_one_process_needs_no_launcher():
    """`mpi=True` is accepted, as MPI accepts a single process; a repeated call changes nothing."""
    role = tw.init(mpi=True)
    assert (role.rank, role.num_processes, role.launcher, role.is_leader) == (0, 1, None, True)
    assert tw.init() is role and tw.init(mpi=True) is role
    with pytest.raises(ConfigError, match="mpi must be as in the first call; got False after True"):
        tw.init(mpi=False)
    tw.shutdown()
    assert str(tw.init(mpi=False)) == "process 0 of 1 (leader)"
    with pytest.raises(ConfigError, match="mpi must be True or False"):
        tw.init(mpi="yes")


def test_shutdown_closes_everything_and_may_be_repeated():
    """Models with queued calls, groups of devices, runtimes and processes; new ones may be opened afterwards."""
    before = threading.active_count()
    for _ in range(2):
        with tw.init() as role:
            assert role.num_processes == 1
            with tw.ProcessGroup(2) as processes:
                model, devices, runtime = (
                    small_model({"dp": 2}),
                    tw.DeviceGroup({"tp": 2}),
                    Runtime(num_workers=1),
                )
                handle = model.forward_async(["y"], x=np.ones((4, 8), np.float32))
                pids = processes.pids[1:]
                tw.shutdown()
                assert (handle.result(0)["y"] == 2).all()
                assert devices.is_closed and processes.is_over
                with pytest.raises(PlanError, match="must be open"):
                    model.backward_async()
                with pytest.raises(ConfigError):
                    runtime.submit(None)
                assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
            for thing in (model, devices, runtime):
                thing.close()
    tw.shutdown()
    assert threading.active_count() == before


def test_shutdown_closes_engines(tmp_path):
    """Their threads end; `close` afterwards does nothing."""
    with tw.LLM(save_model(tmp_path), dtype="f32", max_num_seqs=2) as llm:
        llm.generate(["abc"], tw.SamplingParams(max_tokens=2))
        tw.shutdown()
        with pytest.raises(PlanError, match="the engine must be open"):
            llm.generate(["abc"], tw.SamplingParams(max_tokens=2))
    assert "tilewise-engine" not in [thread.name for thread in threading.enumerate()]


def test_an_open_group_is_used():
    """A group that the program opened before is what `init` reports."""
    with tw.ProcessGroup(3):
        assert tw.init().num_processes == 3
        tw.shutdown()


class Stubborn:
    """Closes at the second attempt."""

    def __init__(self, closed, name, failures=0):
        self.closed, self.name, self.failures = closed, name, failures

    def close(self):
        if self.failures:
            self.failures -= 1
            raise PlanError(self.name)
        self.closed.append(self.name)


def test_what_cannot_be_closed_is_reported_and_tried_again():
    """Everything else is closed, the newest first."""
    closed = []
    things = [Stubborn(closed, name, name == "b") for name in "abc"]
    for thing in things:
        note_open(thing)
    note_open(Stubborn(closed, "dropped"))
    with pytest.raises(PlanError, match="b"):
        tw.shutdown()
    assert closed == ["c", "a"]
    close_all()
    close_all()
    assert closed == ["c", "a", "b"]


FORK = """
import os
import tilewise as tw
from native.distributed.test_lifecycle import small_model
import numpy as np
role, model = tw.init(), small_model()
child = os.fork()
if child == 0:
    tw.shutdown()
    assert tw.init() is not role
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
model.forward(x=np.ones((4, 8), np.float32))
tw.shutdown()
"""


def test_a_fork_closes_nothing_of_its_parent():
    """Its own `init` and `shutdown` are those of another process."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = {**os.environ, "PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install mpich")
LINES = (
    "import tilewise as tw",
    "role = tw.init(mpi={mpi})",
    "print(role)",
    "assert tw.init() is role",
    "{end}",
)


@needs_mpi
@pytest.mark.parametrize("end", ["tw.shutdown(); tw.shutdown()", "pass", "raise SystemExit(3)"])
def test_processes_of_a_launcher_are_joined(tmp_path, end):
    """Lines after `init` run in the leader only; the workers end with it, also without `shutdown`."""
    done = script(tmp_path, *(line.format(mpi="True", end=end) for line in LINES))
    assert done.returncode == (3 if "3" in end else 0), done.stderr
    assert done.stdout == "process 0 of 2 (leader, started by mpiexec)\n"


@needs_mpi
def test_processes_may_work_alone(tmp_path):
    """With `mpi=False` each process is a program of its own."""
    done = script(tmp_path, *(line.format(mpi="False", end="tw.shutdown()") for line in LINES))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("process 0 of 1 (leader)") == 2  # the ends of lines may be written together
