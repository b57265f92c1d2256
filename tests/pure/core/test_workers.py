"""Processes that compute beside this one: results in order, one clear error, nothing left behind."""

import math
import os
import subprocess
import sys
import textwrap
import time

import pytest

from tilewise.core.dims import DimLabel
from tilewise.core.errors import ConfigError, ResourceError, ShapeError
from tilewise.core.workers import WorkerPool, is_portable


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


def test_results_are_in_order(pool):
    """Also of more calls than workers, and of none."""
    done = []
    assert pool.map(math.factorial, [(n,) for n in range(50)], done.append) == [
        math.factorial(n) for n in range(50)
    ]
    assert sum(done) == 50
    assert pool.map(math.factorial, []) == []


def test_it_is_other_processes(pool):
    """Not this one."""
    assert os.getpid() not in pool.map(os.getpid, [()] * 8)


def test_the_first_failure_is_raised_and_the_pool_goes_on(pool):
    """By the order of the calls, not of time."""
    calls = [(n,) for n in (*range(20), -3, *range(20), -4)]
    with pytest.raises(ValueError, match="not defined for negative"):
        pool.map(math.factorial, calls)
    with pytest.raises(ShapeError, match="label"):
        pool.map(DimLabel, [("a", 1), ("", -1)])
    assert pool.map(math.factorial, [(4,)]) == [24]


def test_what_prints_does_no_harm(pool, capfd):
    """Standard output of a worker is for answers."""
    assert pool.map(print, [("hello",)] * 3) == [None] * 3
    assert pool.map(os.system, [("echo more",)]) == [0]
    assert capfd.readouterr().out == ""


def test_a_dead_worker_is_one_error():
    """It says how the process ended; the next call starts others."""
    with WorkerPool(1) as pool:
        with pytest.raises(
            ResourceError, match=r"got the end of process \d+ \(exit status 3\) in a call of _exit"
        ):
            pool.map(os._exit, [(3,)])
        with pytest.raises(ResourceError, match="signal 9"):
            pool.map(os.killpg, [(0, 9)])  # its own group, which it leads
        assert pool.map(math.factorial, [(3,)]) == [6]


def test_no_process_is_left(tmp_path):
    """When the pool is closed, and when the process that owns it is killed."""
    with WorkerPool(2) as pool:
        pids = set(pool.map(os.getpid, [()] * 64))
    assert not [pid for pid in pids if _is_alive(pid)]
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        from tilewise.core.workers import WorkerPool
        pool = WorkerPool(2)
        print(*set(pool.map(os.getpid, [()] * 64)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60).stdout
    for pid in map(int, out.split()):
        for _ in range(200):
            if not _is_alive(pid):
                break
            time.sleep(0.05)
        assert not _is_alive(pid)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_script_without_a_guard_is_not_run_again(tmp_path):
    """No worker imports the main module, as multiprocessing's would."""
    script = tmp_path / "script.py"
    script.write_text(
        "import math\nfrom tilewise.core.workers import WorkerPool\nprint('once')\n"
        "with WorkerPool(2) as pool:\n    print(pool.map(math.factorial, [(5,)]))\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["once", "[120]"]


def test_closed_pools_and_wrong_numbers_are_refused():
    """In our own words."""
    pool = WorkerPool(1)
    pool.close()
    with pytest.raises(ResourceError, match="must be open"):
        pool.map(math.factorial, [(1,)])
    for count in (0, -1, 257, 1.5, "2", True):
        with pytest.raises(ConfigError):
            WorkerPool(count)


@pytest.mark.parametrize(
    ("function", "portable"),
    [
        (math.factorial, True),
        (os.path.join, True),
        (lambda: None, False),
        (_is_alive, True),
        (type("Local", (), {"__call__": print})(), False),
        (3, False),
    ],
    ids=["builtin", "function", "lambda", "ours", "object", "number"],
)
def test_what_another_process_finds_by_name(function, portable):
    """Functions of modules; nothing inside functions."""
    assert is_portable(function) is portable


def test_what_is_no_pickle_is_refused_and_the_pool_goes_on(pool):
    """Arguments as well as results."""
    with pytest.raises(Exception, match="pickle"):
        pool.map(len, [([lambda: None],)])
    with pytest.raises(Exception, match="pickle"):
        pool.map(compile, [("1", "x", "eval")])
    assert pool.map(math.factorial, [(3,)]) == [6]
