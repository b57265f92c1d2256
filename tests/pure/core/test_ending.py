"""Threads that say themselves when they have ended."""

import signal
import threading
from functools import partial

import pytest

from tilewise.core.ending import EndingThread


def test_an_interrupted_wait_is_one_that_can_be_repeated():
    """After Ctrl-C `join` takes the thread for ended; this waits until it is."""
    released = threading.Event()
    thread = EndingThread(released.wait, (60,), "held")
    thread.start()
    interrupt = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, interrupt).start()
        thread.await_end()
    assert not thread.await_briefly() and thread.daemon and thread.name == "held"
    threading.Timer(0.2, released.set).start()
    thread.await_end()
    assert released.is_set() and thread.await_briefly()


def test_a_thread_that_never_begins_is_over():
    """Its start was refused, or interrupted before it began."""
    thread = EndingThread(pytest.fail)
    thread.await_end()
    assert thread.await_briefly()


def test_a_thread_does_not_wait_for_itself():
    """It would for ever, and the end of the program with it."""
    said = []

    def work():
        try:
            thread.await_end()
        except RuntimeError as error:
            said.append(str(error))

    thread = EndingThread(work)
    thread.start()
    thread.await_end()
    assert said == ["a thread cannot wait for its own end"]
