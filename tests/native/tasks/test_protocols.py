"""Larger scenarios of the protocols, too long for `make test`: more threads, longer runs, every execution."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "native/protocols/tests").glob("*_checked_test.cc")
    if "DEEP_HOLDS(" in path.read_text(encoding="utf-8")
)
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def folder():
    """The folder of the native test programs, built as for everyday runs."""
    command = [str(ROOT / ".ci/native_tests"), "release"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return ROOT / "build/native-release/protocols"


@pytest.mark.parametrize("program", PROGRAMS)
def test_protocol_holds_in_every_execution_of_its_largest_scenarios(folder, program):
    """None of some millions of executions violates the protocol."""
    done = subprocess.run(
        [folder / program, "deep"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
