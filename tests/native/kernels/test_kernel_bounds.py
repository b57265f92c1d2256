"""No kernel accesses memory past an operand's end or writes to an input: this folder's tests on guarded pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_guarded(*arguments):
    """Run pytest on this folder with every operand before an inaccessible page."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "guarded_operands",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.run(
        command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_no_kernel_accesses_memory_past_an_end():
    """All kernels, levels and odd sizes of this folder."""
    done = run_guarded(
        str(HERE), "--deselect", f"{HERE}/test_kernel_bounds.py", "-m", "not slow and not soak"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(re.search(r"guarded (\d+) operands", done.stdout)[1]) > 5000


@pytest.mark.slow
def test_the_guard_detects_an_access(tmp_path):
    """The twin: reading a row past the end kills the process."""
    program = tmp_path / "test_past_the_end.py"
    program.write_text(
        "import numpy as np\n"
        "from tilewise.kernels.isa import run\n"
        "def test_past():\n"
        "    x = np.zeros((4, 16), np.float32)\n"
        "    run('gather_rows_f32', [np.zeros((1, 16), np.float32), x, np.array([[4]], np.int32)], [])\n"
    )
    done = run_guarded(str(program), "--rootdir", str(tmp_path), "-c", os.devnull)
    assert done.returncode < 0 or "Segmentation fault" in done.stdout + done.stderr
