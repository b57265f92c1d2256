"""The interpreter's end with unfinished tasks, and Ctrl-C in and at the end of a runtime's block.

Each program below runs in its own interpreter, all of them concurrently.
"""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import tilewise.runtime.runtime
from tilewise.runtime import InOut, LATER, Runtime, TaskGroup
tilewise.runtime.runtime._EXIT_PATIENCE_S = 0.3
signal.signal(signal.SIGINT, signal.default_int_handler)
MANY = 200  # tasks of 20 ms: all of them would take seconds

def say(text, pause=0.0):
    time.sleep(pause)
    print(text, flush=True)

def interrupt(*delays):
    for delay in delays:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True  # else the interpreter waits for it before anything else ends
        timer.start()

def hang():
    threading.Event().wait()
"""

PROGRAMS = {
    "queued": """
rt, alone = Runtime(num_workers=2), Runtime(num_workers=0)
chain = rt.register(np.zeros(1))
for n in range(10):
    rt.submit(lambda _, n=n: say(f"a{n}", 0.01), [InOut(chain)])
    alone.submit(say, scalars=[f"b{n}"])
event = rt.event()
rt.submit(say, scalars=["second"], wait_for=[(event, 1)])
rt.submit(lambda: time.sleep(0.3) or event.post())
""",
    "dropped": """
rt, alone = Runtime(num_workers=1), Runtime(num_workers=0)
for runtime in (rt, alone):
    runtime.submit(say, scalars=["never"], wait_for=[(runtime.event(), 1)])
rt.submit(lambda: 1 / 0)
""",
    "endless": """
rt = Runtime(num_workers=3)
rt.submit(lambda: [None for _ in iter(int, 1)] and None)
rt.submit(hang)
rt.submit(lambda: LATER)
print("buffered")
""",
    "later": """
Runtime(num_workers=1).submit(lambda: LATER)
""",
    "mistake": """
def wait():
    held = x
    threading.Event().wait()

rt = Runtime(num_workers=1)
x = rt.register(np.zeros(4))
threading.Thread(target=wait, daemon=True).start()
raise ValueError("a mistake")
""",
    "interrupted": """
rt = Runtime(num_workers=1)
for n in range(MANY):
    rt.submit(say, scalars=[n, 0.02])
interrupt(0.2)
""",
    "interrupted twice": """
tilewise.runtime.runtime._EXIT_PATIENCE_S = 20
Runtime(num_workers=1).submit(hang)
interrupt(0.2, 0.4)
""",
    "block left by force": """
interrupt(0.1, 0.2)
with Runtime(num_workers=1) as rt:
    rt.submit(hang)
""",
    "blocked in submit": """
rt = Runtime(num_workers=1, window=4)
event = rt.event()

def submit():
    while True:
        rt.submit(None, wait_for=[(event, 1)])

threading.Thread(target=submit, daemon=True).start()
time.sleep(0.2)
""",
    "blocks": """
def end_of_a_block_with_an_event():
    with Runtime(num_workers=1) as rt:
        rt.submit(say, scalars=["never"], wait_for=[(rt.event(), 1)])

def blocks_in_the_block():
    with Runtime(num_workers=1) as rt, rt.registered(np.ones(4)) as (x,), rt.trace(), TaskGroup() as group:
        with group.add(rt.submit(None, [InOut(x)], wait_for=[(rt.event(), 1)])):
            pass

def block_with_a_queue():
    with Runtime(num_workers=1) as rt:
        for n in range(MANY):
            rt.submit(say, scalars=["queue", 0.02])
        time.sleep(20)

def tasks_that_submit():
    def again(n):
        say("again", 0.02)
        if n < MANY:
            rt.submit(again, scalars=[n + 1])

    with Runtime(num_workers=1) as rt:
        rt.submit(again, scalars=[0])

def kernel_on_the_main_thread():
    with Runtime(num_workers=0) as rt:
        for n in range(MANY):
            rt.submit(say, scalars=["main", 0.02])
        rt.wait_all()

def close_without_a_block():
    rt = Runtime(num_workers=1)
    rt.submit(say, scalars=["never"], wait_for=[(rt.event(), 1)])
    try:
        rt.close()
    finally:  # it is as open as before
        rt.cancel_all()
        rt.close()

for body in (end_of_a_block_with_an_event, close_without_a_block, blocks_in_the_block, block_with_a_queue,
             tasks_that_submit, kernel_on_the_main_thread):
    interrupt(0.1)
    begin = time.monotonic()
    try:
        body()
    except KeyboardInterrupt:
        print(body.__name__, time.monotonic() - begin < 2)
""",
}


@pytest.fixture(scope="module")
def ended():
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", HEAD + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name, body in PROGRAMS.items()
    }
    results = {}
    for name, program in running.items():
        try:
            out, err = program.communicate(timeout=30)
        finally:
            program.kill()
        results[name] = SimpleNamespace(lines=out.splitlines(), err=err, code=program.returncode)
    return results


def test_queued_tasks_run_at_exit(ended):
    """The interpreter's end waits for queued tasks, also for those that another task's event releases."""
    lines, expected = ended["queued"].lines, [f"{which}{n}" for which in "ab" for n in range(10)]
    assert sorted(lines) == [*expected, "second"], ended["queued"]
    assert [line for line in lines if line[0] == "b"] == expected[10:]
    assert not ended["queued"].err and ended["queued"].code == 0


def test_tasks_dropped_at_exit_are_reported(ended):
    """Tasks that nothing will release are cancelled with a message; unreported failures are printed."""
    program = ended["dropped"]
    assert program.err.count("got 1 that wait for events") == 2 and not program.lines
    assert "got 'ZeroDivisionError: division by zero'" in program.err and program.code == 0


@pytest.mark.parametrize("name", ["endless", "later", "interrupted twice", "block left by force"])
def test_tasks_that_never_end_at_exit(ended, name):
    """The process ends with a message and an exit code, without a crash, and earlier output is not lost."""
    assert ended[name].code == 1, ended[name]
    assert "[runtime.close] tasks must end before the interpreter does" in ended[name].err
    assert re.search(r"none has ended for \d+(\.\d+)? s;", ended[name].err)
    assert ended[name].lines == (["buffered"] if name == "endless" else [])


def test_exit_with_a_thread_blocked_in_submit(ended):
    """The interpreter ends although a daemon thread keeps submitting tasks."""
    assert ended["blocked in submit"].code == 0, ended["blocked in submit"].err


def test_the_last_line_is_the_programs_error(ended):
    """References of daemon threads are not listed below the program's error."""
    assert ended["mistake"].err.endswith("ValueError: a mistake\n") and ended["mistake"].code == 1


def test_ctrl_c_at_exit_cancels_tasks(ended):
    """Tasks that have not started are cancelled."""
    assert len(ended["interrupted"].lines) < 100
    assert "KeyboardInterrupt" in ended["interrupted"].err


def test_ctrl_c_ends_a_block(ended):
    """Ctrl-C anywhere in a runtime's block ends it soon: tasks that have not started never run."""
    lines = ended["blocks"].lines
    left = [line for line in lines if " " in line]
    assert len(left) == 6 and all(line.endswith(" True") for line in left), ended["blocks"]
    for word in ("queue", "again", "main"):
        assert lines.count(word) < 100
    assert "never" not in lines and ended["blocks"].code == 0
