"""Benchmarks that use internal headers of native/ still compile; the suites do not run them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"


def includes_ours(path: Path) -> bool:
    """Whether a source includes a header below native/ that is not public."""
    names = re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    return any((NATIVE / name).exists() for name in names)


@pytest.mark.parametrize(
    "source", sorted(p for p in (ROOT / "benchmarks").rglob("*.cc") if includes_ours(p)), ids=lambda p: p.name
)
def test_a_benchmark_of_internals_compiles(source):
    """With the headers as they are now."""
    compiler = os.environ.get("CXX", "c++")
    options = ["-std=c++20", "-fsyntax-only", f"-I{NATIVE}", f"-I{NATIVE / 'include'}"]
    done = subprocess.run([compiler, *options, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
