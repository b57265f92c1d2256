"""Forked children have no threads of a runtime: its copy must reject calls, and never wait or delay an exit."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tilewise.core.errors import ConfigError
from tilewise.runtime import InOut, Input, Output, Runtime, TaskGroup

DEADLINE_S = 60


def in_child(body):
    """The result of `body` in a forked child; the child is killed if it does not report in time."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reported = body()
        except BaseException as error:
            reported = f"{type(error).__name__}: {error}"
        os.write(theirs, str(reported).encode())
        os._exit(0)
    os.close(theirs)
    try:
        if not select.select([ours], [], [], DEADLINE_S)[0]:
            os.kill(child, signal.SIGKILL)
            return "the child hangs"
        return os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.waitpid(child, 0)


CALLS = {
    "submit": lambda rt, *_: rt.submit("fill", [Output(bytes=8)], scalars=[8, 0]),
    "submit an empty task": lambda rt, *_: rt.submit(None),
    "submit a Python kernel": lambda rt, *_: rt.submit(lambda: None),
    "wait": lambda rt, task, *_: task.wait(),
    "wait with a timeout": lambda rt, task, *_: task.wait(0.01),
    "ask": lambda rt, task, *_: task.is_complete(),
    "cancel": lambda rt, task, *_: task.cancel(),
    "group": lambda rt, task, *_: TaskGroup([task]).wait_any(0.1),
    "wait_all": lambda rt, *_: rt.wait_all(),
    "read": lambda rt, _, x, __: rt.read(x),
    "write": lambda rt, _, x, __: rt.write(x),
    "unregister": lambda rt, _, x, __: rt.unregister(x),
    "register": lambda rt, *_: rt.register(np.ones(3)),
    "alloc": lambda rt, *_: rt.alloc(4),
    "scope": lambda rt, *_: rt.scope_begin(),
    "raise": lambda rt, _, __, event: event.post(),
    "event": lambda rt, *_: rt.event(),
    "cancel_all": lambda rt, *_: rt.cancel_all(),
    "stats": lambda rt, *_: rt.stats(),
    "record": lambda rt, *_: rt.record().__enter__(),
    "trace": lambda rt, *_: rt.trace().__enter__(),
}


def test_calls_in_a_child(runtime):
    """Every call that would wait, submit or lock raises the error of a closed runtime, with the reason."""
    event, x = runtime.event(), runtime.register(np.ones(4))
    task = runtime.submit(None, [InOut(x)], wait_for=[(event, 1)])

    def body():
        accepted = []
        for name, call in CALLS.items():
            try:
                call(runtime, task, x, event)
                accepted.append(name)
            except ConfigError as error:
                if "[runtime] " not in str(error) or "open one in this process" not in str(error):
                    accepted.append(f"{name}: {error}")
        return accepted

    assert in_child(body) == "[]"
    event.post()
    assert runtime.read(x)[0] == 1  # the parent's runtime goes on


def test_a_child_can_open_its_own_runtime(runtime):
    """A child reads inherited memory, closes its copy, and works with a new runtime."""
    x = np.ones(4)
    task = runtime.submit("fill", [Output(shape=4)], scalars=[16, 0])
    result = task.result()
    runtime.submit(None).wait()

    def body():
        runtime.close()
        with Runtime(num_workers=1) as mine, mine.registered(x) as (hx,):
            mine.submit(lambda v: v.fill(7), [InOut(hx)]).wait()
            return float(mine.read(hx)[0]) + result[0]

    assert in_child(body) == "7.0"


@pytest.mark.slow
def test_fork_while_threads_work(runtime):
    """Calls of a child forked while workers and submitters are busy are rejected, and the parent continues."""
    stop = threading.Event()
    buffers = [runtime.register(np.zeros(8)) for _ in range(4)]
    python = runtime.kernel(lambda *_: None)

    def work(n):
        while not stop.is_set():
            for kernel in ("fill", python, "fill"):
                runtime.submit(kernel, [Output(buffers[n])], scalars=[64, 0])
            runtime.submit(None, [Input(buffers[n])]).wait()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            assert in_child(lambda: runtime.submit("fill")).startswith("ConfigError")
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    runtime.wait_all()


HEAD = """
import multiprocessing, os, signal, sys, threading
import numpy as np
from tilewise.runtime import InOut, Output, Runtime, TaskGroup
signal.alarm(50)

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

PROGRAMS = {
    "leaves through sys.exit with things of every kind alive": """
rt = Runtime(num_workers=2)
event = rt.event()
x = rt.register(np.zeros(4))
task = rt.submit("fill", [Output(shape=4)], scalars=[16, 0])
result = task.result()
group = TaskGroup(rt.submit(lambda: None, wait_for=[(event, 1)]) for _ in range(3))
failed = rt.submit(lambda: 1 / 0)
failed.exception()
child = os.fork()
if child == 0:
    sys.exit(7)
assert ended(child) == 7
event.post()
rt.close()
""",
    "leaves the blocks of its parent": """
import tempfile
folder = tempfile.mkdtemp()
with Runtime(num_workers=2) as rt, rt.scope(), rt.registered(np.ones(4)) as (x,):
    event = rt.event()
    with rt.trace(), rt.graph(folder + "/graph.json"), rt.record(), TaskGroup() as group:
        with group.add(rt.submit(None, [InOut(x)], wait_for=[(event, 1)])):
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert ended(child) == 7
            event.post()
""",
    "ends normally after a block": """
with Runtime(num_workers=2) as rt:
    rt.submit(None).wait()
    child = os.fork()
if child == 0:
    sys.exit(7)
assert ended(child) == 7
""",
    "is a process of multiprocessing": """
def body(queue):
    try:
        rt.submit(None)
    except ValueError as error:
        queue.put(str(error))
    with Runtime(num_workers=1) as mine:
        mine.submit(lambda: None).wait()

rt = Runtime(num_workers=2)
rt.submit(lambda: None).wait()
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
children = [context.Process(target=body, args=(queue,)) for _ in range(3)]
for child in children:
    child.start()
for child in children:
    child.join()
    assert child.exitcode == 0
    assert "open one in this process" in queue.get()
rt.submit(lambda: None).wait()
rt.close()
""",
    "is a process of multiprocessing, started inside a kernel": """
def body():
    try:
        rt.submit(None).wait()
    except ValueError:
        with Runtime(num_workers=1) as mine:
            mine.submit(lambda: None).wait()
        return
    sys.exit(3)

def kernel():
    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join()
    assert child.exitcode == 0

rt = Runtime(num_workers=2)
rt.submit(kernel).wait()
rt.close()
""",
    "leaves the kernel in which it was forked": """
def kernel(code):
    children.append(os.fork())
    if children[-1] == 0 and code:
        sys.exit(code)

children = []
with Runtime(num_workers=1) as rt:
    rt.submit(kernel, scalars=[7]).wait()
    rt.submit(kernel, scalars=[0]).wait()
assert [ended(child) for child in children] == [1, 0]
""",
    "is forked by a thread while others wait": """
rt = Runtime(num_workers=2, window=4)
event = rt.event()

def submit():
    for _ in range(9):
        rt.submit(None, wait_for=[(event, 1)])

def fork():
    child = os.fork()
    if child == 0:
        try:
            rt.wait_all()
        except ValueError:
            os._exit(7)
    codes.append(ended(child))

codes = []
threads = [threading.Thread(target=target) for target in (submit, fork)]
for thread in threads:
    thread.start()
threads[1].join()
event.post()
threads[0].join()
rt.close()
assert codes == [7], codes
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_of_forked_programs(name):
    """A child ends with its own exit code, and its parent after it."""
    command = [sys.executable, "-c", HEAD + PROGRAMS[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
