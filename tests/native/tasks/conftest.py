"""Native code for the tests of the task runtime, and runtimes that are closed after tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import tilewise
from tilewise.runtime import Runtime

SOURCE = Path(__file__).with_name("kernels.cc")


def compile_library(source: Path, target: Path) -> Path:
    """A shared library on the runtime's C interface, as a user would build it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    library = tilewise.get_library()
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{tilewise.get_include()}"]
    links = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltilewise_pto"]
    command = [compiler, *flags, str(source), "-o", str(target), *links]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> Path:
    return compile_library(SOURCE, tmp_path_factory.mktemp("kernels") / "libkernels.so")


@pytest.fixture
def runtime():
    """A runtime with two workers, closed after the test; waiting tasks of a failed test are cancelled."""
    rt = Runtime(num_workers=2, window=64)
    rescue = threading.Timer(20, rt.cancel_all)
    try:
        with rt:
            yield rt
            rescue.start()
    finally:
        rescue.cancel()
