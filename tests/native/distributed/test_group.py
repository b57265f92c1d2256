"""Processes of a group: equal start, end with their leader, and no leftovers."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tilewise.comm import active_group
from tilewise.comm import group as group_module
from tilewise.comm.peer import JoinedPeer
from tilewise.core import ConfigError, PeerLost, PlanError
from tilewise.distributed import ProcessGroup

LEADER = """
import os, signal, sys, time
from tilewise.distributed import ProcessGroup
group = ProcessGroup(3)
group.start()
print(*group.pids[1:], flush=True)
"""


def is_there(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def are_gone(pids, within_s=5.0):
    """Whether processes end in time."""
    until = time.monotonic() + within_s
    while (left := any(map(is_there, pids))) and time.monotonic() < until:
        time.sleep(0.01)
    return not left


def left_open(before=()):
    """Possible leftovers of a group: descriptors of this process that it did not have before.

    Its memory has no names: see `named_memory`. Files of earlier tests may be closed meanwhile.
    """
    return sorted({*os.listdir("/proc/self/fd")}.difference(before))


def named_memory(pid):
    """Names of the shared memory that a process has mapped: what could remain after its end."""
    return re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())


@contextmanager
def two_processes():
    """A started group of two processes; afterwards no process or descriptor of it remains."""
    before = left_open()
    with ProcessGroup(2) as group:
        group.start()
        workers = group.pids[1:]
        yield group
    assert are_gone(workers, 0) and left_open(before) == []


def test_the_lifecycle_of_a_group():
    """Workers run while it is open; afterwards no process or descriptor remains."""
    before = left_open()
    with ProcessGroup(3) as group:
        assert active_group() is group and group.pids == [os.getpid()]
        group.start()
        group.start()
        workers = group.pids[1:]
        assert len(workers) == 2 and all(map(is_there, workers))
    assert active_group() is None and are_gone(workers, 0) and left_open(before) == []
    with pytest.raises(PeerLost, match="got a closed one"):
        group.start()
    group.close()


def test_one_process_is_a_group():
    """It has no workers."""
    with ProcessGroup(1) as group:
        group.start()
        assert group.pids == [os.getpid()] and group.processes_of(3) == [0, 0, 0]


def test_one_group_at_a_time():
    """A second group is rejected, even with an invalid size, and the first continues."""
    with ProcessGroup(2) as group:
        with pytest.raises(ConfigError, match="one group at a time"):
            ProcessGroup(2)
        assert active_group() is group
    for number in (0, 1025, 2.5, True):
        with pytest.raises(ConfigError, match="num_processes"):
            ProcessGroup(number)
    assert active_group() is None


def test_devices_are_spread_evenly():
    """Contiguous blocks; every process has at least one device, otherwise the plan is rejected."""
    with ProcessGroup(3) as group:
        assert group.processes_of(3) == [0, 1, 2]
        assert group.processes_of(4) == [0, 0, 1, 2]
        assert group.processes_of(8) == [0, 0, 0, 1, 1, 1, 2, 2]
        with pytest.raises(ValueError, match="got 2 devices for 3 processes"):
            group.processes_of(2)
        for odd in (4.0, True):
            with pytest.raises(ConfigError, match="num_devices must be an integer"):
                group.processes_of(odd)


@pytest.mark.parametrize(
    "fact",
    ["instruction set", *(pytest.param(f, marks=pytest.mark.slow) for f in ("version", "native module"))],
)
def test_a_worker_with_different_facts(monkeypatch, fact):
    """It is rejected at the start with both values; all workers end."""
    before = left_open()
    own = {**group_module.own_facts(), fact: "another"}
    monkeypatch.setattr(group_module, "own_facts", lambda: own)
    with ProcessGroup(3) as group:
        with pytest.raises(
            ConfigError, match=rf"the same {fact}; got 'another' in the leader and '.*' in process 1"
        ):
            group.start()
        with pytest.raises(PeerLost, match="got its end by ConfigError"):
            group.start()
    assert left_open(before) == []


def test_a_worker_that_cannot_collect_its_facts(monkeypatch, capfd):
    """Its own error reaches the user once, with its number."""
    own = group_module.own_facts()
    monkeypatch.setattr(group_module, "own_facts", lambda: own)
    monkeypatch.setenv("TILEWISE_ISA", "none")
    with (
        ProcessGroup(2) as group,
        pytest.raises(PlanError, match=r"must name a level .* got 'none'.* \(process 1 \(pid [0-9]+\)\)"),
    ):
        group.start()
    assert capfd.readouterr().err == ""


def test_the_facts_of_a_process_are_checked():
    """An invalid process number, and that of a process that has ended."""
    with subprocess.Popen(["true"]) as ended:
        pass
    for pid in (None, True, "1", -1, 0, 1 << 40, ended.pid):
        with pytest.raises(PeerLost, match=r"must report its process id|got the end of pid"):
            JoinedPeer(1, None).met(pid, True)


def test_a_killed_worker():
    """The next call detects it, says how it ended, and ends the others; later calls repeat the error."""
    with ProcessGroup(3) as group:
        group.start()
        workers = group.pids[1:]
        os.kill(workers[1], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(PeerLost, match=rf"process 2 \(pid {workers[1]}\) has ended: signal 9"):
                group.ask(1, "stats")
        assert are_gone(workers, 0)


def test_a_stopped_worker(monkeypatch):
    """Without a sign of life: an error in time, and its end."""
    monkeypatch.setattr(group_module, "_ANSWER_S", 0.2)
    with ProcessGroup(2) as group:
        group.start()
        (worker,) = group.pids[1:]
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(
            group_module.CommError, match=rf"nothing from process 1 \(pid {worker}\) for 0.2 s"
        ):
            group.ask(1, "open", {})
        assert are_gone([worker], 0)


ENDS = {
    "exit": "sys.exit(3)",
    "quiet exit": "os._exit(3)",
    "aborted": "os.abort()",
    "with a forked child": "if os.fork(): os._exit(0)\ntime.sleep(5)",
}


@pytest.mark.parametrize(
    "end",
    [
        "with a forked child",
        *(pytest.param(end, marks=pytest.mark.slow) for end in ("exit", "quiet exit", "aborted")),
    ],
)
def test_workers_end_with_their_leader(end):
    """However the leader ends, even while a forked child has its sockets open."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER + ENDS[end]], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in leader.stdout.readline().split()]
    assert len(workers) == 2
    leader.wait(60)
    assert are_gone(workers, 2.0)
    leader.stdout.close()


def test_workers_outlive_signals_and_forked_copies_of_their_leader():
    """Ctrl-C and SIGTERM are for the leader. A forked copy has no group and does not affect the workers."""
    with ProcessGroup(2) as group:
        group.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(group.pids[1], number)
        child = os.fork()
        if child == 0:
            is_none = active_group() is None
            group.close()
            os._exit(0 if is_none else 1)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.1)
        assert is_there(group.pids[1])
