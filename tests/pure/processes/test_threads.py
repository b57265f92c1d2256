"""Background threads: waiting for them, and their end with the program's."""

import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from tilewise.processes.threads import BackgroundThread


def test_interrupted_wait_can_be_repeated():
    """After Ctrl-C `join` takes the thread for finished; this waits until it is."""
    released = threading.Event()
    thread = BackgroundThread(released.wait, (60,), "held", stop=released.set)
    thread.start()
    interrupt = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, interrupt).start()
        thread.wait()
    assert not thread.wait_briefly() and thread.daemon and thread.name == "held"
    threading.Timer(0.2, released.set).start()
    thread.wait()
    assert released.is_set() and thread.wait_briefly()


def test_thread_that_never_starts_counts_as_finished():
    """Its start failed, or was interrupted before it began."""
    thread = BackgroundThread(pytest.fail, stop=pytest.fail)
    thread.wait()
    assert thread.wait_briefly()


def test_thread_does_not_wait_for_itself():
    """It would wait forever, and block the end of the program."""
    errors = []

    def work():
        try:
            thread.wait()
        except RuntimeError as error:
            errors.append(str(error))

    thread = BackgroundThread(work, stop=pytest.fail)
    thread.start()
    thread.wait()
    assert errors == ["a thread cannot wait for its own end"]


AT_EXIT = """
import sys, threading, time
from tilewise.processes.threads import BackgroundThread

def work(number):
    while not asked.is_set():
        asked.wait(0.01)
    time.sleep(0.05)
    sys.stdout.write(f"{number} ")

asked = threading.Event()
for number in range(3):
    BackgroundThread(work, (number,), stop=asked.set).start()
"""


def test_threads_are_stopped_and_joined_at_exit():
    """A program that ends without stopping them ends after all of them."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr, sorted(done.stdout.split())) == (0, "", ["0", "1", "2"])
