"""Shared by all tests: fixed seeds, plain output, and a limit for tests that hang."""

import faulthandler
import gc
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every everyday run, so that a change is judged by what it changed; `make soak` draws new ones.
# No deadline: two noisy cores say nothing about an example's time.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("drawn", deadline=None)
settings.load_profile("same")

# Where continuous integration sets these, pytest explains two different tensors' bytes by a full diff of their texts,
# which takes minutes each, and takes them of comparisons that are meant to fail too.
for variable in ("CI", "BUILD_NUMBER"):
    os.environ.pop(variable, None)

sys.path.insert(
    0, str(Path(__file__).parent)
)  # helpers are imported by their folder: `from policy.source import ...`


@pytest.fixture
def same_ops():
    """Remove the ops that a test registers."""
    from tilewise.ir import op as op_table

    before = dict(op_table._OPS)
    yield
    op_table._OPS.clear()
    op_table._OPS.update(before)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    """Help texts and progress are compared as plain text of a fixed width."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def no_collection():
    """Without the garbage collector: hypothesis hooks into it, and an interrupt inside its hook is lost."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def thread_count():
    """Number of this process's threads; with an argument, once at most so many are left, or after five seconds."""

    def count(expected=None):
        for _ in range(500):
            num_threads = len(os.listdir("/proc/self/task"))
            if expected is None or num_threads <= expected:
                break
            time.sleep(0.01)
        return num_threads

    return count


@pytest.fixture
def two_hosts(tmp_path_factory):
    """Two "hosts" (`support/hosts.py`) with their own networks, names and shared memory."""
    from support.hosts import Hosts, missing  # needed here alone

    reason = missing()
    if reason:
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


# A test that hangs ends its process after a while, which needs no interpreter's lock, and leaves the stack of every
# thread, as one does that crashes. Under xdist these stand in files, which the summary shows below all else.
_STACKS = pytest.StashKey()
_LIMIT_S = 240
_SLOW_LIMIT_S = 1200
_RUNNER = re.compile(
    r'site-packages/(pluggy|_pytest|xdist|execnet)/|File "<string>"'
)  # the same in all stacks


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Runs in the controlling process: gives each worker a file for its stacks."""
    folder = node.config.stash.get(_STACKS, None) or tempfile.TemporaryDirectory(prefix="stacks-")
    node.config.stash[_STACKS] = folder
    node.workerinput["stacks"] = str(Path(folder.name, f"{node.gateway.id}-{len(os.listdir(folder.name))}"))
    Path(node.workerinput["stacks"]).touch()


def pytest_sessionstart(session):
    """Runs after pytest's own faulthandler, which writes to a place that xdist does not show."""
    if "stacks" in getattr(session.config, "workerinput", {}):
        session.config.stash[_STACKS] = open(session.config.workerinput["stacks"], "w")  # noqa: SIM115
        faulthandler.enable(session.config.stash[_STACKS])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Tests of `make soak` have no time limit."""
    if item.get_closest_marker("soak") is None and "stacks" in getattr(item.config, "workerinput", {}):
        limit = _LIMIT_S if item.get_closest_marker("slow") is None else _SLOW_LIMIT_S
        faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[_STACKS])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter, config):
    """Show the stacks of processes that hung or crashed."""
    folder = config.stash.get(_STACKS, None)
    left = [] if folder is None else [path.read_text() for path in sorted(Path(folder.name).iterdir())]
    for stacks in filter(None, left):
        terminalreporter.section("where a process ended that hung or crashed")
        lines = [line for line in stacks.splitlines() if not _RUNNER.search(line)]
        terminalreporter.write("\n".join(lines) + "\n")


def pytest_configure(config):
    """PyTorch and our workers share two cores with xdist, so its thread pools stay small."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where a shell started us in the background
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
