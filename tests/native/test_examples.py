"""The examples run, and stay short."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9]*.py"))


LONGEST = ("14_", "15_", "16_")  # models that train for a while


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * p.stem.startswith(LONGEST), id=p.stem) for p in EXAMPLES],
)
def test_example_runs_and_is_short(path):
    """An example succeeds, writes nothing to standard error, and has fewer than 80 lines."""
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
