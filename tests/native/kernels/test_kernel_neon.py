"""aarch64 by emulation: C++ tests, and this folder's tests at the level `neon`, with the bits of avx2."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulated_level import LEVEL, KernelServer, run_and_compare
from kernel_checks import empty, even_splits, packed, random, rng

from tilewise.kernels import isa

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SERVER = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(ROOT / "build/native-aarch64/kernels/kernel_server")]
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def native_tests():
    """The output of building for aarch64 and running its C++ tests."""
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt install g++-aarch64-linux-gnu qemu-user")
    if "avx2" not in isa.isa_levels():
        pytest.skip("compares with the level avx2, which this machine lacks")
    command = [str(ROOT / ".ci/native_tests"), "aarch64"]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)


@pytest.fixture
def server(native_tests):
    assert native_tests.returncode == 0, native_tests.stdout[-3000:] + native_tests.stderr[-3000:]
    server = KernelServer(SERVER)
    yield server
    server.close()


def test_native_tests_pass_on_aarch64(native_tests):
    """Task runtime, tile programs, signals and arenas: all C++ tests that the emulator can run."""
    assert native_tests.returncode == 0, native_tests.stdout[-3000:] + native_tests.stderr[-3000:]
    assert "100% tests passed" in native_tests.stdout


def test_every_kernel_case_holds_at_neon(server):
    """All kernels and odd sizes of this folder; the bits of every call, fp32 and bf16, equal those of avx2."""
    assert server.level == LEVEL
    command = [sys.executable, "-m", "pytest", "-q", "-p", "emulated_level", "-p", "no:cacheprovider"]
    command += ["--kernel-server", " ".join(SERVER), "-m", "not slow and not soak", str(HERE)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.search(r"compared (\d+) calls", done.stdout)[1]) > 3000


def test_another_arithmetic_is_detected(server):
    """The twin: a level that rounds products before the addition differs."""
    gen = rng(1)
    a, w = random(gen, 9, 65), random(gen, 33, 65)
    tiles = [empty(9, 33), None, a, packed(w, "f32")]
    ints = [1, 1, 1, *even_splits(65, 1)]
    run_and_compare(server, isa.run, "avx2", "matmul_f32", tiles, ints)
    with pytest.raises(AssertionError, match="operand 0 of matmul_f32 differs"):
        run_and_compare(server, isa.run, "baseline", "matmul_f32", tiles, ints)


def test_reading_past_an_end_ends_the_server(server):
    """Operands end at inaccessible pages there, too: reading a row beyond the last one is detected."""
    x = np.zeros((4, 16), np.float32)
    with pytest.raises(RuntimeError, match="the kernel server ended"):
        server.run("gather_rows_f32", [np.zeros((1, 16), np.float32), x, np.array([[4]], np.int32)])
