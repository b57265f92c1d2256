"""Processes that compute with this one: results in order, one clear error, nothing left behind."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import pytest

from tilewise.core.dims import DimLabel
from tilewise.core.errors import ConfigError, ResourceError, ShapeError
from tilewise.core.workers import Shared, WorkerPool, _Turns, is_portable


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


def where(seconds):
    """Takes a while, and says where."""
    time.sleep(seconds)
    return os.getpid()


def die_elsewhere(owner, how):
    """Ends a worker that is not the owner of the pool."""
    time.sleep(0.05)
    if os.getpid() != owner:
        how[0](*how[1:])


def test_it_is_this_process_and_others(pool):
    """As many as were asked for, together."""
    found = set(pool.map(where, [(0.05,)] * 64))
    assert len(found) == pool.count == 2 and os.getpid() in found
    with WorkerPool(1) as alone:
        assert set(alone.map(where, [(0.0,)] * 4)) == {os.getpid()}


def test_the_first_failure_is_raised_and_the_pool_goes_on(pool):
    """By the order of the calls, not of time."""
    calls = [(n,) for n in (*range(20), -3, *range(20), -4)]
    with pytest.raises(ValueError, match="not defined for negative"):
        pool.map(math.factorial, calls)
    with pytest.raises(ShapeError, match="label"):
        pool.map(DimLabel, [("a", 1), ("", -1)])
    assert pool.map(math.factorial, [(4,)]) == [24]


def print_elsewhere(owner, text):
    """Prints in other processes, and their children."""
    time.sleep(0.01)
    if os.getpid() != owner:
        print(text)
        os.system("echo more")


def test_what_prints_does_no_harm(pool, capfd):
    """Standard output of a worker is for answers."""
    assert pool.map(print_elsewhere, [(os.getpid(), "hello")] * 100) == [None] * 100
    assert pool.map(math.factorial, [(4,)]) == [24]
    assert capfd.readouterr().out == ""


def test_a_dead_worker_is_one_error():
    """It says how the process ended; the next call starts others."""
    with WorkerPool(2) as pool:
        for how, words in (((os._exit, 3), "exit status 3"), ((os.killpg, 0, 9), "signal 9")):
            with pytest.raises(
                ResourceError, match=rf"the end of process \d+ \({words}\) in a call of die_else"
            ):
                pool.map(die_elsewhere, [(os.getpid(), how)] * 100)
        assert pool.map(math.factorial, [(3,)]) == [6]


@pytest.mark.slow
def test_no_process_is_left(tmp_path):
    """When the pool is closed, and when the process that owns it is killed."""
    with WorkerPool(2) as pool:
        pids = set(pool.map(where, [(0.05,)] * 64)) - {os.getpid()}
    assert pids and not [pid for pid in pids if _is_alive(pid)]
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        from tilewise.core.workers import WorkerPool
        pool = WorkerPool(3)
        pool.map(time.sleep, [(0.02,)] * 64)
        print(*(link.process.pid for link in pool._links), flush=True)
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


def name_of(function, seconds):
    """Of a function, after a while."""
    time.sleep(seconds)
    return str(function)


def code_of(text, seconds):
    """What no pickle holds, after a while."""
    time.sleep(seconds)
    return compile(text, "x", "eval")


def test_what_is_no_pickle_is_refused_and_the_pool_goes_on(pool):
    """Arguments as well as results."""
    with pytest.raises(Exception, match="pickle"):
        pool.map(name_of, [(lambda: None, 0.05)] * 64)
    with pytest.raises(Exception, match="pickle"):
        pool.map(code_of, [("1", 0.05)] * 64)
    assert pool.map(math.factorial, [(3,)]) == [6]


def long_answer(number, data):
    """More than a pipe holds."""
    return number, data * 2


def test_long_questions_and_answers_pass_each_other(pool):
    """A worker is asked ahead: both sides write at once, and neither waits for the other to read."""
    data = b"x" * (1 << 20)
    assert pool.map(long_answer, [(n, data) for n in range(32)]) == [(n, data * 2) for n in range(32)]


def test_this_process_may_do_something_else_first(pool):
    """`begin` has the others begin; `finish` works with them, and has every result in order."""
    with pool.begin(math.factorial, [(n,) for n in range(40)]) as shared:
        meanwhile = math.factorial(50)
        assert shared.finish() == [math.factorial(n) for n in range(40)]
    with pool.begin(math.factorial, []) as shared:
        assert shared.finish() == []
    assert meanwhile == math.factorial(50)


@pytest.mark.parametrize(("count", "others"), [(0, 1), (1, 1), (15, 1), (1000, 0), (4011, 2)])
def test_batches_shrink_to_single_calls(count, others):
    """Every call is in one of them, in order; no batch is larger than the one before."""
    turns = _Turns([None] * count, others)
    batches = [*iter(lambda: turns.take(None), [])]
    assert [n for batch in batches for n in batch] == [*range(count)]
    sizes = [len(batch) for batch in batches]
    assert sizes == sorted(sizes, reverse=True) and all(sizes) and (not sizes or sizes[-1] == 1)


def test_who_keeps_something_works_on_it_first():
    """Then on what is nowhere, then on what others would have taken last; each call is taken once."""
    homes = [n % 3 if n % 4 else None for n in range(96)]
    for worker in (None, 0, 2):
        turns = _Turns(homes, 3)
        taken = [n for batch in iter(lambda t=turns, w=worker: t.take(w), []) for n in batch]
        own, common = ([n for n, home in enumerate(homes) if home == h] for h in (worker, None))
        first = common if worker is None else own + common
        assert taken[: len(first)] == first and sorted(taken) == [*range(96)]
        stolen = taken[len(first) :]
        assert all(homes[n] not in (worker, None) for n in stolen)


def test_threads_share_the_batches():
    """Several feeders take from one list at once; each batch goes to one of them."""
    with WorkerPool(6) as pool:
        for _ in range(3):
            assert pool.map(abs, [(-n,) for n in range(3000)]) == [*range(3000)]


def test_what_is_not_finished_is_given_up(pool):
    """Without an error, too; the pool works on."""
    with pool.begin(where, [(0.01,)] * 64) as shared:
        assert not shared.is_done
    assert pool.map(math.factorial, [(4,)]) == [24]


def test_an_error_meanwhile_leaves_a_pool_that_works(pool):
    """What was begun is given up."""
    with pytest.raises(KeyError), pool.begin(where, [(0.01,)] * 64):
        raise KeyError("meanwhile")
    assert pool.map(math.factorial, [(4,)]) == [24]


def test_results_come_one_by_one(pool):
    """In order, while others are still at work; each is computed once, by one of them."""
    with pool.begin(where, [(0.005,)] * 60) as shared:
        found, left = [], []
        for pid in shared.in_order():
            found.append(pid)
            left.append(60 - len(shared._results))
        assert shared.is_done and len(found) == 60 and left[0] > 0 == left[-1]
    assert len({*found}) == 2


def test_who_has_nothing_to_do_sleeps(pool, monkeypatch):
    """This process asks for work once per result that it waits for; it does not turn in circles until that is there."""
    asked = []
    work_once = Shared._work_once

    def count(self):
        asked.append(1)
        return work_once(self)

    monkeypatch.setattr(Shared, "_work_once", count)
    pool.map(abs, [(1,)] * 40)
    with pool.begin(where, [(0.3,)]) as shared:
        while any(shared._turns._lists.values()):
            time.sleep(0.001)  # until the other has it
        asked.clear()
        assert shared.finish() != [os.getpid()]
    assert len(asked) < 5


def test_an_interrupted_wait_leaves_no_thread(pool, monkeypatch):
    """Ctrl-C when all is done but that the threads which feed others end: they still do before their pipes go."""
    serve, served, released = Shared._serve, threading.Event(), threading.Event()

    def linger(self, worker, link):
        serve(self, worker, link)
        served.set()
        assert released.wait(60)

    monkeypatch.setattr(Shared, "_serve", linger)
    interrupt = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), pool.begin(where, [(0.01,)] * 8) as shared:
        assert served.wait(60)
        threading.Timer(0.1, interrupt).start()
        threading.Timer(0.5, released.set).start()
        shared.finish()
    assert released.is_set()
    monkeypatch.undo()
    assert pool.map(math.factorial, [(4,)]) == [24]


def test_results_that_are_wanted_no_more(pool):
    """What is left in the middle is given up."""
    with pool.begin(where, [(0.01,)] * 64) as shared:
        next(shared.in_order())
    assert not shared.is_done and pool.map(math.factorial, [(4,)]) == [24]
