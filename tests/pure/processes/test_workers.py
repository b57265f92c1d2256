"""`WorkerPool`: results in order, one clear error, no processes left."""

import math
import os
import subprocess
import sys
import time

import pytest

from tilewise.core.dims import DimLabel
from tilewise.core.errors import ConfigError, ResourceError, ShapeError
from tilewise.processes.workers import WorkerPool


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


def where(seconds):
    """Wait a while, and return the process id."""
    time.sleep(seconds)
    return os.getpid()


def nested(count):
    """Use a pool inside a worker."""
    with WorkerPool(count) as pool:
        return [os.getpid(), *pool.map(where, [(0.0,)] * 4)]


def code_of(text):
    """Return a value that cannot be pickled."""
    return compile(text, "x", "eval")


def test_results_are_in_order_from_other_processes(pool):
    """With one worker, and inside a worker, no process is started."""
    calls = [(n,) for n in range(50)]
    assert list(pool.map(math.factorial, calls)) == [math.factorial(n) for n in range(50)]
    assert list(pool.map(math.factorial, [])) == []
    processes = set(pool.map(where, [(0.05,)] * 16))
    assert len(processes) == pool.count == 2 and os.getpid() not in processes
    with WorkerPool(1) as alone:
        assert set(alone.map(where, [(0.0,)] * 4)) == {os.getpid()}
    for pids in pool.map(nested, [(2,)] * 2):
        assert len({*pids}) == 1


@pytest.mark.parametrize(
    ("function", "calls", "error", "words"),
    [
        (math.factorial, [(n,) for n in (*range(20), -3, *range(20), -4)], ValueError, "not defined for neg"),
        (DimLabel, [("a", 1), ("", -1)], ShapeError, "label"),
        (str, [(lambda: None,)] * 8, Exception, "pickle"),
        (code_of, [("1",)] * 8, Exception, "pickle"),
        (
            os._exit,
            [(3,)],
            ResourceError,
            "must live as long as their pool; got the end of one in a call of _exit",
        ),
    ],
    ids=["error", "our_error", "argument", "result", "exit"],
)
def test_first_error_is_raised_and_the_pool_remains_usable(pool, function, calls, error, words):
    """By the order of the calls, not of time. After a worker has died, the next call starts new workers."""
    with pytest.raises(error, match=words):
        list(pool.map(function, calls))
    assert list(pool.map(math.factorial, [(4,)])) == [24]


def test_closed_pools_and_wrong_numbers_are_rejected():
    """With a TilewiseError."""
    pool = WorkerPool(1)
    pool.close()
    with pytest.raises(ResourceError, match="must be open"):
        pool.map(math.factorial, [(1,)])
    for count in (0, 257):
        with pytest.raises(ConfigError):
            WorkerPool(count)


SCRIPT = """
import os, signal, sys, time
from tilewise.processes.workers import WorkerPool
print("once", flush=True)
pool = WorkerPool(2)
print(*{*pool.map(os.getppid, [()] * 8)} - {os.getpid()})
print(*{*pool.map(os.getpid, [()] * 8)}, flush=True)
if sys.argv[1:] == ["kill"]:
    os.kill(os.getpid(), signal.SIGKILL)
pool.close()
"""


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_script_without_a_guard_runs_once_and_leaves_no_process(tmp_path, ending):
    """No worker runs the main module. Workers end when the pool is closed, and when its process is killed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), ending]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    once, parents, workers = run.stdout.splitlines()
    assert once == "once" and not parents and workers and (run.returncode == 0) is (ending == "close")
    deadline = time.monotonic() + 30
    while any(_is_alive(pid) for pid in workers.split()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
