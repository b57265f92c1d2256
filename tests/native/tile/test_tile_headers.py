"""The headers of tile calls: a C program, the C++ example, and the CMake target, on the installed package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import tilewise
from native.tasks.test_native_programs import build_with_cmake

EXAMPLE = Path(__file__).parents[3] / "examples" / "12_tile_level.cpp"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-O1"]

C_PROGRAM = r"""
#include <stdio.h>
#include <string.h>

#include "tilewise/tile.h"

static float x[4][6], y[4][6], w[5][6], out[4][5], rows[2][6];
static float panels[32 * 6];

static int check(int holds, const char* what) {
  if (!holds) printf("%s: %s\n", what, pto_last_error());
  return holds ? 0 : 1;
}

static int says(const char* words) { return strstr(pto_last_error(), words) != NULL; }

int main(void) {
  int wrong = 0;
  PTORuntime* rt = NULL;
  if (pto_runtime_open(NULL, &rt) != PTO_OK) return 1;
  for (int i = 0; i < 4; ++i) for (int j = 0; j < 6; ++j) x[i][j] = (float)(i - j);
  for (int i = 0; i < 5; ++i) for (int j = 0; j < 6; ++j) w[i][j] = i == j ? 1.0f : 0.0f;
  wrong += check(pto_tile_packed_elements(5, 6) == 32 * 6, "elements");
  wrong += check(pto_tile_pack(PTO_F32, w, 6, 5, 6, panels) == PTO_OK, "pack");
  const pto_tile tx = pto_tile_of(pto_register(rt, x, sizeof(x)), PTO_F32, 4, 6);
  const pto_tile ty = pto_tile_of(pto_register(rt, y, sizeof(y)), PTO_F32, 4, 6);
  const pto_tile to = pto_tile_of(pto_register(rt, out, sizeof(out)), PTO_F32, 4, 5);
  const pto_tile tr = pto_tile_of(pto_register(rt, rows, sizeof(rows)), PTO_F32, 2, 6);
  pto_tile tw = pto_tile_of(pto_register(rt, panels, sizeof(panels)), PTO_F32, 5, 6);
  tw.is_packed = 1;

  wrong += check(pto_tile_relu(rt, &tx, &ty) == PTO_OK && y[3][0] == 3 && y[0][3] == 0, "relu");
  const pto_task_spec options = {.worker_type = PTO_CUBE, .flags = PTO_KEEP, .name = "mine"};
  const pto_task task = pto_tile_scale_async(rt, &tx, &ty, 2.0, &options);
  wrong += check(task != 0 && pto_wait(rt, task, PTO_FOREVER) == PTO_OK && y[3][0] == 6, "scale");
  pto_task_release(rt, task);
  const int64_t range[] = {0, 6};
  wrong += check(pto_tile_matmul(rt, &tx, &tw, &to, 1, 1, range, 2, NULL) == PTO_OK && out[3][1] == 2, "matmul");
  const pto_tile part = {tx.buffer, 6 * sizeof(float), 2, 6, 12, PTO_F32, 0}; /* rows 1 and 3 */
  wrong += check(pto_tile_copy(rt, &part, &tr) == PTO_OK && rows[1][0] == 3, "copy");

  wrong += check(pto_tile_relu(rt, &tx, &to) == PTO_BAD_ARGUMENT && says("[tile.relu] sizes"), "sizes");
  wrong += check(pto_tile_relu_async(rt, NULL, &ty, NULL) == 0 && says("must be passed"), "absent");
  pto_tile outside = tx;
  outside.offset = 8;
  wrong += check(pto_tile_relu(rt, &outside, &ty) < 0 && says("lie in its buffer"), "outside");
  pto_tile overlapping = tx;
  overlapping.stride = 3;
  wrong += check(pto_tile_relu(rt, &overlapping, &ty) < 0 && says("do not overlap"), "stride");
  wrong += check(pto_tile_matmul(rt, &tx, &tw, &to, 1000, 1, range, 2, NULL) < 0, "many");
  wrong += check(pto_tile_kernel_find("fetch") < 0 && pto_tile_kernel_find(NULL) < 0, "find");
  wrong += check(pto_tile_run(rt, NULL) < 0 && pto_tile_submit(NULL, NULL) == 0, "null");
  wrong += check(pto_tile_pack(PTO_I32, w, 6, 5, 6, panels) < 0, "pack of integers");
  return wrong + (pto_runtime_close(rt) == PTO_OK ? 0 : 1);
}
"""


def run_program(tmp_path: Path, compiler: str, source: Path) -> subprocess.CompletedProcess[str]:
    """Compile a program as docs/runtime_native.md says, and run it."""
    library, standard = tilewise.get_library(), "-std=c11" if compiler == "gcc" else "-std=c++20"
    links = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltilewise_tile", "-ltilewise_pto", "-pthread"]
    command = [
        compiler,
        standard,
        *WARNINGS,
        f"-I{tilewise.get_include()}",
        str(source),
        "-o",
        str(tmp_path / "program"),
    ]
    done = subprocess.run([*command, *links], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=60, check=False)


def test_a_c_program(tmp_path):
    """Blocking and asynchronous calls, panels, parts of buffers, and the errors of invalid calls."""
    (tmp_path / "program.c").write_text(C_PROGRAM, encoding="utf-8")
    done = run_program(tmp_path, "gcc", tmp_path / "program.c")
    assert done.returncode == 0, done.stdout


def test_the_cpp_example(tmp_path):
    """The five usage patterns compute what they say; a comment stands where they differ from the plan."""
    done = run_program(tmp_path, "g++", EXAMPLE)
    assert done.returncode == 0 and "all five patterns" in done.stdout
    text = EXAMPLE.read_text(encoding="utf-8")
    assert [f"Pattern {n}:" in text for n in range(1, 6)] == [True] * 5 and text.count("// C++: ") >= 5


def test_the_cpp_program_of_the_page(tmp_path):
    """The C++ block of docs/tiles.md."""
    page = (EXAMPLE.parents[1] / "docs" / "tiles.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```cpp\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "program.cpp").write_text(block, encoding="utf-8")
    done = run_program(tmp_path, "g++", tmp_path / "program.cpp")
    assert done.returncode == 0, done.stderr


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES CXX)
find_package(tilewise CONFIG REQUIRED)
find_package(Threads REQUIRED)
add_executable(program {source})
target_compile_features(program PRIVATE cxx_std_20)
target_link_libraries(program PRIVATE tilewise::tile Threads::Threads)
"""


@pytest.mark.slow
def test_the_cmake_target(tmp_path):
    """`tilewise::tile` has headers, both libraries and their rpath."""
    build = build_with_cmake(tmp_path, CMAKE.format(source=EXAMPLE))
    subprocess.run([build / "program"], check=True, capture_output=True, timeout=60)
