"""A test that hangs or crashes ends only its own process, with its location; comparisons of large
byte strings do not hang (`tests/conftest.py`).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import ctypes, time
def test_before(): pass
def test_hanging(): time.sleep(600)
def test_crashing(): ctypes.string_at(0)
def test_after(): pass
"""


def run_tests(folder, *options, **environment):
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-c", os.devnull, folder]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder, env=os.environ | environment
    )


@pytest.mark.slow
def test_hanging_and_crashing_tests_are_located(tmp_path):
    """The others pass, and the summary ends with the stacks of both."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("_LIMIT_S = 240", "_LIMIT_S = 2"))
    (tmp_path / "test_ends.py").write_text(TESTS)
    ended = run_tests(tmp_path, "-n", "2")
    said = ended.stdout[ended.stdout.index("where a process ended") :]
    assert ended.returncode == 1
    assert "2 failed, 2 passed" in said
    assert "Timeout (0:00:02)!" in said and "line 4 in test_hanging" in said
    assert "Segmentation fault" in said and "line 5 in test_crashing" in said
    assert "pluggy" not in said


@pytest.mark.parametrize("variable", ["CI", "BUILD_NUMBER"])
def test_large_bytes_are_not_diffed(tmp_path, variable):
    """Also in continuous integration: pytest's full diff of two tensors' bytes would take minutes."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_bytes.py").write_text(
        "import numpy as np\ndef test_bytes():\n    draw = np.random.default_rng(0).bytes\n"
        "    assert draw(256) == draw(256)\n"
    )
    ended = run_tests(tmp_path, **{variable: "1"})
    assert ended.returncode == 1 and "1 failed" in ended.stdout and "Full diff" not in ended.stdout
