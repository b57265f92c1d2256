"""Shared by all tests: one seed, no colours, no temporary files outside pytest's own."""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every everyday run, so that a change is judged by what it changed; `make soak` draws new ones.
# No deadline: two noisy cores say nothing about an example's time.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("drawn", deadline=None)
settings.load_profile("same")

sys.path.insert(
    0, str(Path(__file__).parent)
)  # helpers are imported by their folder: `from policy.source import ...`


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    """Help texts and progress are compared as plain text of a fixed width."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def no_collection():
    """For tests that interrupt themselves once: hypothesis hears of every collection of cycles, and an interrupt that
    comes while it listens is printed and lost."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def thread_count():
    """Counts this process's threads: `thread_count()` now, `thread_count(n)` when n are left, or after five seconds.

    The system takes a thread off its list a moment after it was joined.
    """

    def count(expected=None):
        for _ in range(500):
            found = len(os.listdir("/proc/self/task"))
            if expected is None or found == expected:
                break
            time.sleep(0.01)
        return found

    return count


def pytest_collection_modifyitems(items):
    """Long tests may take longer than `timeout` says, those of `make soak` as long as they want."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(0))
        elif item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1200))


def pytest_configure(config):
    """PyTorch and our own workers share two cores with xdist; its thread pools stay small."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where a shell started us in the background
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
