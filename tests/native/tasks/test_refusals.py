"""Mistakes that the Python interface must reject because the runtime could not detect them.

Ids of two runtimes may be equal, an address of 0 is not a kernel, NumPy treats True as a mask,
read-only memory must not be written, and a forked child has no threads of the runtime.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from tilewise.runtime import Input, Runtime, TaskExecutionHints, TaskGroup

FORK = """
import os, sys
from tilewise.runtime import Runtime
rt = Runtime(num_workers=1)
rt.submit(None).wait()
child = os.fork()
if child == 0:
    sys.exit(7)
status = os.waitpid(child, 0)[1]
rt.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    "name", ["after", "wait_for", "predicate", "read", "write", "unregister", "freeze", "complete"]
)
def test_objects_of_another_runtime_are_rejected(runtime, name):
    """A task, buffer or event works only with its own runtime, even if ids are equal."""
    with Runtime(num_workers=1) as other:
        task, event = runtime.submit(None), runtime.event()
        mine, _ = runtime.register(np.ones(4)), other.register(np.ones(4))
        other.event()
        calls = {
            "after": lambda: other.submit(None, after=[task]),
            "wait_for": lambda: other.submit(None, wait_for=[(event, 1)]),
            "predicate": lambda: other.submit(None, predicate=mine),
            "read": lambda: other.read(mine),
            "write": lambda: other.write(mine),
            "unregister": lambda: other.unregister(mine),
            "freeze": lambda: other.freeze(mine),
            "complete": lambda: other.task_complete(task),
        }
        with pytest.raises(ValueError, match="of another"):
            calls[name]()


def test_a_group_holds_tasks_of_one_runtime(runtime):
    """A group rejects a task of a second runtime, whose id may equal one of its tasks."""
    with Runtime(num_workers=1) as other, pytest.raises(ValueError, match="one runtime"):
        TaskGroup([runtime.submit(None), other.submit(None)])


def test_a_replay_binds_buffers_of_its_runtime(runtime):
    """A recording rejects buffers of another runtime."""
    mine = runtime.register(np.zeros(4, np.float32))
    with runtime.record() as recording:
        runtime.submit(None, [Input(mine)])
    with Runtime(num_workers=1) as other, pytest.raises(ValueError, match="of another"):
        recording.replay({mine: other.register(np.zeros(4, np.float32))})


@pytest.mark.parametrize("kernel", [0, -8, ctypes.CFUNCTYPE(ctypes.c_int)()])
def test_invalid_addresses_are_rejected(runtime, kernel):
    """Null pointers and negative addresses are not called."""
    with pytest.raises(ValueError, match=r"\[runtime.kernel\]"):
        runtime.submit(kernel)


def test_a_boolean_index_is_rejected(runtime):
    """`buffer[True]`: NumPy would give the whole array, but the box would be row 1."""
    with pytest.raises(ValueError, match="integers and non-empty"):
        runtime.register(np.zeros((4, 4)))[True]


def test_read_only_memory_stays_read_only(runtime):
    """Read-only memory can be neither made writable nor written by the host."""
    buffer = runtime.register(b"constant")
    with pytest.raises(ValueError, match="read-only"):
        runtime.freeze(buffer, False)
    with pytest.raises(ValueError, match="read-only"):
        runtime.write(buffer)


def test_numbers_too_large_for_the_runtime_are_named(runtime):
    """Priorities, values of events and steps out of range raise a ValueError with our text."""
    event = runtime.event()
    with pytest.raises(ValueError, match="priority"):
        TaskExecutionHints(priority=1 << 40)
    with pytest.raises(ValueError, match="value to wait for"):
        runtime.submit(None, wait_for=[(event, -4)])
    with pytest.raises(ValueError, match="only rise"):
        event.post(1 << 64)


def test_a_forked_child_ends():
    """A forked child leaves through sys.exit without waiting for threads that it does not have."""
    ended = subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False)
    assert ended.returncode == 7


def test_overlapping_memory_is_rejected(runtime):
    """Arrays that share bytes would be two buffers whose tasks are not ordered."""
    x = np.zeros(8)
    with runtime.registered(x[2:6]):
        for part in (x, x[5:], x[:3], x[3:4]):
            with pytest.raises(ValueError, match="shares bytes"):
                runtime.register(part)
        with runtime.registered(x[:2], x[6:]):
            pass
    with runtime.registered(x):
        pass


EXIT = """
import threading, time
from tilewise.runtime import LATER, Runtime
rt = Runtime(num_workers=1, window=4)
event = rt.event()

def submit():
    while True:
        rt.submit(None, wait_for=[(event, 1)])

threading.Thread(target=submit, daemon=True).start()
time.sleep(0.2)
"""


def test_exit_with_a_thread_blocked_in_submit():
    """The interpreter ends although a daemon thread keeps submitting tasks."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
