"""docs/adding_an_op.md: its Python runs in order, its C++ is compiled and run, its claims are checked."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import change_first

from tilewise.core import ShapeError
from tilewise.ir import op as op_table
from tilewise.kernels import KERNELS, table
from tilewise.kernels.isa import isa_levels

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding_an_op.md"


@pytest.fixture(scope="module")
def page():
    """The names that the page's blocks define; the op is removed again afterwards."""
    text = PAGE.read_text(encoding="utf-8")
    module = sys.modules["adding_an_op"] = ModuleType("adding_an_op")  # dataclasses look it up
    names = vars(module)
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], PAGE.name, "exec"), names)  # errors name the page's own lines
    yield names
    op_table._OPS.pop(names["Mix"].name)
    del sys.modules["adding_an_op"]


def test_every_block_runs(page):
    """The page's op is registered, correct on one device, equal on meshes, and its gradient is correct."""
    assert op_table.op_named("mix") is page["Mix"]


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}], ids=str)
def test_result_on_a_mesh(page, axes):
    """Equal to NumPy on one device; two devices equal one, to the bit."""
    results = []
    for mesh in ({}, axes):
        graph = page["build"]()
        with graph.instantiate(graph.plan(mesh)) as model:
            model.initialize(seed=3, scale=0.5)
            model.forward(**page["data"])
            results.append(model.get_tensor("y"))
            x = page["data"]["x"].astype(np.float64)
            a, b = (x @ model.get_tensor(n).T.astype(np.float64) for n in "ab")
    expected = (1 - page["SHARE"]) * a + page["SHARE"] * b
    assert np.abs(results[0] - expected).max() <= 2e-6 * np.abs(expected).max()
    assert results[0].tobytes() == results[1].tobytes()


def test_a_wrong_shard_is_detected(page):
    """The twin: a device of the mesh that uses other shares is detected."""
    results = []
    for fault in (0.0, 0.01):
        graph = page["build"]()
        more = change_first(
            "",
            lambda i, by=fault: replace(i, floats=(i.floats[0] + by,)),
            device=1,
            program="forward",
            kernel="scale_f32",
        )
        plan = more(graph.plan({"dp": 2}))
        with graph.instantiate(plan) as model:
            model.initialize(seed=3, scale=0.5)
            model.forward(**page["data"])
            results.append(model.get_tensor("y"))
    assert results[0].tobytes() != results[1].tobytes()


def test_a_wrong_gradient_is_detected(page, monkeypatch):
    """The twin: the page's finite differences detect swapped shares."""

    def swapped(self, tape, grads):
        return {"a": tape.scale(grads[0], self.share), "b": tape.scale(grads[0], 1 - self.share)}

    monkeypatch.setattr(page["Mix"], "gradient", swapped)
    measured, promised = page["slopes"]("a")
    assert abs(measured - promised) > 0.01 * promised


def test_a_wrong_share_is_rejected_by_the_call(page):
    """The message has the op, the rule, the value and the operands."""
    graph = page["build"]()
    x = graph.find("x")
    with pytest.raises(ShapeError, match=r"\[graph.mix\] share must lie in \[0, 1\], not at 1.5.*; clip it"):
        graph.op("mix", [x, x], share=1.5)


def blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(rf"^   ```{language}\n(.*?)^   ```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r"^   ", "", block, flags=re.MULTILINE) for block in blocks]


HARNESS = """
extern "C" int mix_on(const char* name, float* out, float* a, float* b, long rows, long cols, double share) {
  using namespace tilewise::kernels;
  const TileView tiles[] = {{out, rows, cols, cols}, {a, rows, cols, cols}, {b, rows, cols, cols}};
  const KernelArgs args = {tiles, 3, nullptr, 0, &share, 1, 0, {nullptr, 0}};
  const EntryList list = TILEWISE_ISA_NS::elementwise_entries();
  for (int i = 0; i < list.count; ++i)
    if (std::string_view(list.entries[i].name) == name) return list.entries[i].fn(args), 0;
  return 1;
}
"""


GENERATOR = ROOT / "native" / "kernels" / "declarations.py"


def generated(folder, declaration):
    """The page's code in its op family, and what the build makes from both; returns the specification of `mix`."""
    source = (ROOT / "native" / "kernels" / "elementwise.cc").read_text(encoding="utf-8")
    head, mark, tail = source.partition("\n}  // namespace\n}  // namespace tilewise")
    assert mark
    kernels = folder / "kernels"
    kernels.mkdir()
    (kernels / "elementwise.cc").write_text(
        head + "\n\n" + declaration + mark + tail + HARNESS, encoding="utf-8"
    )
    command = [sys.executable, str(GENERATOR), str(folder), str(folder), "elementwise"]
    subprocess.run(command, check=True)
    names: dict[str, Any] = {}
    exec((folder / "declared.py").read_text(encoding="utf-8"), names)
    (fields,) = (fields for fields in names["DECLARED"] if fields["base"] == "mix")
    return table.declared_spec(fields)


def compiled(folder, level):
    """The op family's kernels with the page's code, as a library of one instruction-set level."""
    (kernel,) = blocks("cpp")
    generated(folder, kernel)
    cmake = (ROOT / "native" / "kernels" / "CMakeLists.txt").read_text(encoding="utf-8")
    (flags,) = re.findall(rf"tilewise_level\({level}([^)]*)\)", cmake)[:1]
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "clang++"
    library = folder / "mix.so"
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi", *flags.split()]
    folders = ["-I", str(ROOT / "native"), "-I", str(folder)]
    source = str(folder / "kernels" / "elementwise.cc")
    command = [compiler, *options, f"-DTILEWISE_ISA_NS={level}", *folders, source]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(library))


@pytest.mark.slow
def test_the_native_source_compiles_and_agrees(tmp_path):
    """The page's C++, in the file and with the flags that it names, computes the expected result."""
    library = compiled(tmp_path, isa_levels()[-1])
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((5, 37), np.float32) for _ in range(2))
    out = np.full_like(a, np.nan)
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (out, a, b)]
    sizes = [ctypes.c_long(5), ctypes.c_long(37), ctypes.c_double(0.25)]
    assert library.mix_on(b"mix_f32", *pointers, *sizes) == 0
    expected = 0.75 * a.astype(np.float64) + 0.25 * b
    assert np.abs(out - expected).max() <= 1e-6 * np.abs(expected).max()
    assert library.mix_on(b"mix_f16", *pointers, *sizes) == 1


def test_the_declaration_lowers_the_op(page, monkeypatch, tmp_path):
    """With the page's declaration, short or long, the op without `lower` calls the kernel of its name."""
    monkeypatch.delattr(page["Mix"], "lower")
    specs = []
    for name, text in (("short", blocks("cpp")[0]), ("long", blocks("text")[0])):
        (tmp_path / name).mkdir()
        specs.append(generated(tmp_path / name, text))
        monkeypatch.setitem(KERNELS, "mix", specs[-1])
        monkeypatch.setitem(table._BY_NAME, "mix_f32", specs[-1])
        program = page["build"]().plan({}).program
        calls = [i for c in program.classes for t in c.templates for i in t.instructions]
        (call,) = (i for i in calls if i.kernel == "mix_f32")
        assert len(call.operands) == 3 and call.floats == (page["SHARE"],)
    sizes = {"m": 3, "d": 5, "item": 2}
    assert [s.operands for s in specs] == [specs[0].operands] * 2
    assert [(s.flops(sizes), s.bytes(sizes)) for s in specs] == [(45, 90)] * 2
