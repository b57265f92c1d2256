"""Mutated files in every reader: it succeeds or raises one of our own errors in one line, in
bounded time and memory.

Three lengths. `make test`: valid files and a few mutated ones. `make test-slow`: about 20 seconds
for each reader of model files, checkpoints and messages, one second for the others, always the same
inputs. `make soak`: ten minutes per reader with atheris, which searches for inputs that reach new
lines. A failing input is printed; it becomes a case of the reader's own tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuzz.readers import PLANTED, READERS, Reader, attempt, inputs
from tilewise.core import ConfigError

NUM_EVERY_DAY = 40
LONGEST_S = 10.0  # of one input
MOST_BYTES = 512 << 20  # by which a reader's inputs may raise the memory of this process
SOAK_S = 600
HAS_ATHERIS = importlib.util.find_spec("atheris") is not None
needs_atheris = pytest.mark.skipif(
    not HAS_ATHERIS, reason="atheris is not installed: pip install '.[fuzz]' (x86-64 only)"
)


class Hangs(BaseException):
    """An input takes too long; derived from BaseException so that no reader catches it."""


@contextmanager
def limited(seconds: float):
    """Raises `Hangs` if the block takes longer."""

    def stop(number, frame):
        raise Hangs(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def throw(reader: Reader, folder: Path, count: int, seconds: float = LONGEST_S) -> int:
    """Read the valid files and `count` mutated ones; returns how many were accepted."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_accepted = 0
    for number, data in enumerate(inputs(reader, count)):
        try:
            with limited(seconds):
                num_accepted += attempt(reader, folder, data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # panics of libraries are not even exceptions
            pytest.fail(f"input {number}, {data!r}: {type(error).__name__}: {error}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    assert grown < MOST_BYTES, f"memory grew by {grown} bytes"
    return num_accepted


@pytest.mark.parametrize("name", READERS)
def test_valid_files_are_accepted(name, tmp_path):
    """The seeds are valid, except those that their reader lists as invalid, such as an empty text."""
    reader = READERS[name]
    refused = [data for data in reader.seeds() if not attempt(reader, tmp_path, data)]
    assert refused == ([b""] if name == "texts" else [])


@pytest.mark.parametrize("name", READERS)
def test_wrong_files_are_refused_in_our_own_words(name, tmp_path):
    """A few mutated inputs for every reader."""
    throw(READERS[name], tmp_path, NUM_EVERY_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_wrong_files_are_refused_in_our_own_words(name, tmp_path):
    """Many mutated inputs; some must be accepted, so that code after the checks is reached."""
    reader = READERS[name]
    assert throw(reader, tmp_path, reader.num_in_ci) > len(reader.seeds())


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda data: {}[0], "KeyError: 0"),
        (lambda data: time.sleep(10), r"Hangs: it took more than 0\.2 s"),
        (lambda data: sys.exit("ended"), "SystemExit: ended"),
        (lambda data: (_ for _ in ()).throw(ConfigError("two\nlines")), "AssertionError"),
    ],
    ids=["foreign error", "hang", "exit", "two lines"],
)
def test_a_planted_fault_is_found(fault, what, tmp_path):
    """The twin: a reader with a planted bug fails."""

    def read(folder, data):
        if b"9999" in data:
            fault(data)

    planted = Reader(read, PLANTED.seeds, 0, PLANTED.mutation)
    with pytest.raises(pytest.fail.Exception, match=what):
        throw(planted, tmp_path, 2000, 0.2)


def _run_atheris(name: str, folder: Path, *options: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a reader in its own process, because a crash is a finding, too."""
    program = Path(__file__).parent / "with_atheris.py"
    return subprocess.run(
        [sys.executable, str(program), name, str(folder), "-print_final_stats=1", *options],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )


@needs_atheris
@pytest.mark.soak
@pytest.mark.parametrize("name", READERS)
def test_ten_minutes_of_atheris(name, tmp_path):
    """Ten minutes of atheris find no foreign exception, hang, use of 3 GiB, or crash."""
    done = _run_atheris(name, tmp_path, f"-max_total_time={SOAK_S}", timeout=SOAK_S + 300)
    crashes = {path.name: path.read_bytes()[:2000] for path in tmp_path.iterdir() if path.is_file()}
    assert done.returncode == 0 and not crashes, f"{crashes}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed and int(executed[1]) > 1000, done.stderr[-2000:]


@needs_atheris
@pytest.mark.soak
def test_atheris_finds_a_planted_fault(tmp_path):
    """The twin: atheris finds a planted bug within a minute and stores the input."""
    done = _run_atheris("planted", tmp_path, "-max_total_time=60", timeout=120)
    (crash,) = tmp_path.glob("crash-*")
    assert done.returncode != 0 and "KeyError" in done.stdout + done.stderr and b"9999" in crash.read_bytes()
