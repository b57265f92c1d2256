"""C++ programs: orchestrations loaded by path, a program built with CMake, and two processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tilewise
from native.tasks.conftest import SOURCE, compile_library
from tilewise.core.errors import PeerLost, TaskFailed
from tilewise.runtime import InOut, Input, Output, Runtime


def test_orchestration(runtime, kernels):
    """A library's function submits tasks with arguments; its failure is raised."""
    x = np.zeros(1, np.int64)
    with runtime.registered(x) as (hx,):
        runtime.run_orchestration(kernels, "orchestrate", [hx, 100, 3, 0])
        assert x[0] == 300
        with pytest.raises(TaskFailed, match="got 5"):
            runtime.run_orchestration(kernels, "orchestrate", [hx, 1, 1, 1])
        with pytest.raises(TaskFailed):
            runtime.run_orchestration(kernels, "orchestrate", [12345, 1, 1, 0])
        with pytest.raises(ValueError, match="export the function"):
            runtime.run_orchestration(kernels, "missing", [])
        with pytest.raises(ValueError, match="library must load"):
            runtime.run_orchestration("missing.so", "orchestrate", [])


def test_orchestration_that_throws(kernels):
    """Its scopes are closed, so their memory can be used again, and the exception is reported."""
    with Runtime(num_workers=1, heap_bytes=1 << 20) as rt:
        for _ in range(3):
            with pytest.raises(TaskFailed, match="thrown on purpose"):
                rt.run_orchestration(kernels, "throw_in_scopes", [1 << 20])
        with rt.scope():
            rt.alloc(1 << 20)


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES CXX)
find_package(tilewise CONFIG REQUIRED)
add_library(user_kernels SHARED {source})
target_compile_features(user_kernels PRIVATE cxx_std_17)
target_link_libraries(user_kernels PRIVATE tilewise::pto)
"""


def build_with_cmake(folder, text):
    """Configure and build a user's project; returns the build folder."""
    (folder / "CMakeLists.txt").write_text(text, encoding="utf-8")
    build = folder / "build"
    cmake = [str(Path(sys.executable).with_name("cmake"))]
    if not Path(cmake[0]).exists():
        cmake = ["cmake"]
    configure = [*cmake, "-S", str(folder), "-B", str(build), f"-Dtilewise_DIR={tilewise.get_cmake_dir()}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run([*cmake, "--build", str(build)], check=True, capture_output=True)
    return build


def test_cmake_package(runtime, tmp_path):
    """find_package(tilewise) gives a target with header and library; the built library can be loaded."""
    build = build_with_cmake(tmp_path, CMAKE.format(source=SOURCE))
    x = np.zeros(1, np.int64)
    with runtime.registered(x) as (hx,):
        runtime.run_orchestration(build / "libuser_kernels.so", "orchestrate", [hx, 10, 1, 0])
    assert x[0] == 10


PAGE = Path(__file__).parents[3] / "docs" / "runtime_native.md"


@pytest.mark.slow
def test_the_page_of_native_programs(tmp_path):
    """Every command of docs/runtime_native.md runs, in order, on the page's programs."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    files = {"c": "first.c", "cpp": "program.cpp", "cmake": "CMakeLists.txt", "python": "run_matmul.py"}
    assert sorted(kind for kind, _ in blocks if kind != "sh") == sorted(files)
    for kind, block in blocks:
        if kind in files:
            assert kind == "cmake" or files[kind] in block.splitlines()[0]
            (tmp_path / files[kind]).write_text(block, encoding="utf-8")
    (tmp_path / "examples").symlink_to(PAGE.parents[1] / "examples")
    commands = "set -ex\n" + "".join(block for kind, block in blocks if kind == "sh")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", commands], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_page_describes_the_graph(runtime, tmp_path):
    """Its table names exactly the fields of a task in the file."""
    with runtime.graph(tmp_path / "graph.json"):
        runtime.submit(None, name="alone")
    fields = set(json.loads((tmp_path / "graph.json").read_text())["tasks"][0])
    table = PAGE.read_text(encoding="utf-8").split("| field of a task |")[1]
    assert {
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    } == fields


def start_workers(path, *libraries):
    options = [part for library in libraries for part in ("--library", str(library))]
    return subprocess.Popen([sys.executable, "-m", "tilewise.runtime.workers", str(path), *options])


def test_two_processes(kernels, tmp_path):
    """Tasks submitted here run there, on memory that both share."""
    path = tmp_path / "shared"
    workers = start_workers(path, kernels)
    try:
        with Runtime(shared_path=path, num_workers=2, window=16) as rt, rt.scope():
            rt.load_library(kernels)
            x = rt.alloc(1, np.int64)
            rt.write(x)[...] = 0
            for _ in range(100):
                rt.submit("add_i64", [InOut(x)], scalars=[2])
            last = rt.submit("next_i64", [Output(shape=1, dtype=np.int64), Input(x)])
            assert last.result()[0] == 201
            with pytest.raises(ValueError, match="both sides' libraries"):
                rt.submit(lambda: None)
            with pytest.raises(ValueError, match="lie in the shared file"):
                rt.register(np.zeros(4))
            last = x = None
        assert workers.wait(10) == 0
    finally:
        workers.kill()
        workers.wait()


def test_killed_workers(kernels, tmp_path):
    """Killing the workers' process gives PeerLost long before the task's end; the runtime can be closed."""
    path = tmp_path / "shared"
    workers = start_workers(path, kernels)
    try:
        with Runtime(shared_path=path, num_workers=1) as rt:
            rt.load_library(kernels)
            task = rt.submit("nap", scalars=[60_000])
            time.sleep(0.2)
            os.kill(workers.pid, signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(PeerLost, match="workers' process"):
                task.wait()
            assert time.monotonic() - begin < 30
    finally:
        workers.kill()
        workers.wait()


def test_workers_without_orchestrator(tmp_path):
    """The workers' process ends if no orchestrator creates the shared file."""
    command = [sys.executable, "-m", "tilewise.runtime.workers", str(tmp_path / "none"), "--timeout", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "start it first" in done.stderr


def test_workers_reject_an_invalid_file_in_one_line(tmp_path):
    """A file that no runtime made is rejected in one line, with its own exit code."""
    (tmp_path / "other").write_bytes(bytes(1 << 16))
    command = [sys.executable, "-m", "tilewise.runtime.workers", str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        r"\[runtime.workers_run\] the path must be a runtime's shared file; got .*\n", done.stderr
    )


def test_missing_workers(tmp_path):
    """A runtime without workers is an error after the given time."""
    with pytest.raises(TimeoutError, match="must attach"):
        Runtime(shared_path=tmp_path / "shared", num_workers=1, peer_timeout_s=0.1)


def test_matmul_orchestration_example(runtime, tmp_path):
    """The C++ example gives NumPy's product, also for sides of different lengths."""
    source = Path(__file__).parents[3] / "examples" / "06_matmul_orchestration.cpp"
    library = compile_library(source, tmp_path / "matmul.so")
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((128, 192), dtype=np.float32), rng.standard_normal((192, 64), dtype=np.float32)
    c = np.full((128, 64), np.nan, np.float32)
    with runtime.registered(a, b, c) as buffers:
        runtime.run_orchestration(library, "matmul_orchestration", [*buffers, 128, 192, 64])
    assert np.abs(c - a @ b).max() < 1e-4
