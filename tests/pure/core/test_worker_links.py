"""Nothing waits for ever: not for a process that has ended, for a lock of an import, or for itself."""

import math
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tilewise.core import worker_link
from tilewise.core.errors import ResourceError
from tilewise.core.workers import WorkerPool


def run(tmp_path, text, **files):
    """What a script prints, which ends in time."""
    for name, content in {"script": text, **files}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(content))
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            return process.communicate(timeout=30)[0].split()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("it hangs")


def test_a_module_that_uses_a_pool_while_it_is_imported(tmp_path):
    """Its functions are found by name in a module whose lock is held: threads that write pickles would wait for it."""
    module = """
        from tilewise.core.workers import WorkerPool
        def double(number):
            return 2 * number
        with WorkerPool(2) as pool:
            found = pool.map(double, [(n,) for n in range(40)])
        print(len(found), found[-1])
        """
    assert run(tmp_path, "import at_import", at_import=module) == ["40", "78"]


def test_workers_end_with_a_parent_whose_copy_lives_on(tmp_path):
    """A forked process holds the pipes to them open."""
    script = """
        import os, signal, time
        from tilewise.core.workers import WorkerPool
        pool = WorkerPool(2)
        pool.map(time.sleep, [(0.02,)] * 32)
        copy = os.fork()
        if not copy:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        links = getattr(pool, "_links", None) or pool._children
        print(copy, *(getattr(link, "process", link).pid for link in links), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    copy, *workers = map(int, run(tmp_path, script))
    try:
        deadline = time.monotonic() + 20
        while any(is_alive(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert workers and not any(is_alive(pid) for pid in workers)
    finally:
        os.kill(copy, signal.SIGKILL)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def die_elsewhere(owner, data):
    """Ends a worker that is not the owner of the pool."""
    time.sleep(0.01)
    if os.getpid() != owner:
        os._exit(3)
    return len(data)


@pytest.mark.parametrize("size", [1, 3 << 20], ids=["reading", "writing"])
def test_a_dead_worker_whose_pipes_are_still_open(monkeypatch, size):
    """Another process, forked in the wrong moment, holds its ends: neither a read nor a write would ever end."""
    held, pipe = [], os.pipe

    def keep_ends():
        ends = pipe()
        if len(held) < 4:  # the worker's; the next is of its start
            held.extend(map(os.dup, ends))
        return ends

    monkeypatch.setattr(worker_link.os, "pipe", keep_ends)
    try:
        with WorkerPool(2) as pool:
            pool.start()
            monkeypatch.undo()
            with pytest.raises(ResourceError, match=r"exit status 3\) in a call of die_elsewhere"):
                pool.map(die_elsewhere, [(os.getpid(), b"x" * size)] * 40)
            assert pool.map(math.factorial, [(4,)]) == [24]
    finally:
        for end in held:
            os.close(end)


def test_what_python_prints_when_it_starts_is_no_answer(monkeypatch, tmp_path):
    """As a `sitecustomize` may; it was taken for the length of an answer."""
    noisy = tmp_path / "python"
    noisy.write_text(f'#!/bin/sh\necho "much more than eight bytes"\nexec {sys.executable} "$@"\n')
    noisy.chmod(noisy.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(noisy))
    with WorkerPool(2) as pool:
        assert pool.map(math.factorial, [(n,) for n in range(30)]) == [math.factorial(n) for n in range(30)]


def test_a_call_inside_a_call_is_refused():
    """One thread would wait for itself; another one has its turn."""
    with WorkerPool(2) as pool:
        with pytest.raises(ResourceError, match="one behind the other"), pool.begin(abs, [(1,)]):
            pool.map(abs, [(2,)])
        with pytest.raises(ResourceError, match="one behind the other"), pool.begin(abs, [(1,)]):
            pool.close()
        assert pool.map(abs, [(-3,)]) == [3]


def test_paths_that_are_no_text_are_left_out(monkeypatch):
    """As Python's own imports do."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), b"/nowhere"])
    with WorkerPool(2) as pool:
        assert pool.map(abs, [(-n,) for n in range(30)]) == [*range(30)]


def leave_elsewhere(owner):
    """Asks to end the program, in a worker."""
    time.sleep(0.01)
    if os.getpid() != owner:
        sys.exit("enough")


def test_a_function_that_ends_the_program_is_one_error():
    """As if it had been called here."""
    with WorkerPool(2) as pool:
        with pytest.raises(SystemExit, match="enough"):
            pool.map(leave_elsewhere, [(os.getpid(),)] * 64)
        assert pool.map(abs, [(-3,)]) == [3]


def test_threads_that_feed_have_ended_when_a_call_is_given_up():
    """Before their pipes are closed, whose numbers other files get."""
    with WorkerPool(3) as pool:
        for _ in range(5):
            with pool.begin(time.sleep, [(0.05,)] * 64) as shared:
                feeders = shared._feeders
            assert feeders and not any(feeder.is_alive() for feeder in feeders)
