"""native/kernels/declarations.py: mistakes in declarations, and what is made from correct ones."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.kernels import KERNELS
from tilewise.kernels.table import declared_spec, is_declared

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "native" / "kernels" / "declarations.py"
FAMILIES = re.findall(
    r"set\(FAMILIES ([^)]*)\)", (ROOT / "native" / "kernels" / "CMakeLists.txt").read_text(encoding="utf-8")
)[0].split()
HEAD = """// kernel mix  f32 bf16
//   out out[m d]
//   in a[m d], b?[m d]
//   flops m * d
//   bytes 3 * item * m * d
"""
LISTS = """// kernel mix  f32 bf16
//   out out[m d]
//   in a...[m k*], w...[n k*]
//   int count=count(a), cuts, range...(2*cuts*count)
//   double rest...
//   flops m * d
//   bytes item * m * d
//   scratch len(range) * out.cols
"""
# what to replace in which declaration, its replacement, the line of the mistake and a part of the message
MISTAKES = [
    (HEAD, "mix  f32", "Mix  f32", 1, "must begin with `// kernel name dtype...`; got 'Mix  f32 bf16'"),
    (
        HEAD,
        "bf16",
        "f16",
        1,
        "dtypes must be different ones of f32, bf16, f64, i32, or dtype=type; got 'f16'",
    ),
    (HEAD, "bf16", "f32", 1, "must be different"),
    (HEAD, "bf16", "bf16=", 1, "or dtype=type; got 'bf16='"),
    (HEAD, "  f32 bf16", "", 2, "without dtypes must have a dtype; got 'out'"),
    (HEAD, "//   flops m * d\n", "", 1, "must have a line `flops`"),
    (HEAD, "//   bytes 3", "//   flops 3", 5, "must have one line `flops`"),
    (HEAD, "//   out out", "//   output out", 2, "must begin with in, out, inout, int"),
    (HEAD, "out[m d]", "out[m]", 2, "must be [rows cols]"),
    (HEAD, "out[m d]", "out[m -1]", 2, "must be [rows cols]"),
    (HEAD, "out[m d]", "out[m d", 2, "must be written name[:dtype][!|~][...][?][[rows cols]]; got 'out[m d'"),
    (HEAD, "out[m d]", "out[m d*]", 2, "must belong to a list"),
    (HEAD, "out[m d]", "out:f8[m d]", 2, "dtype must be dt, f32 or bf16 or f64 or i32"),
    (HEAD, "a[m d]", "a...?[m d]", 3, "a list of operands must not be optional"),
    (HEAD, "b?[m d]", "a[m d]", 3, "a name must be used once"),
    (HEAD, "b?[m d]", "scratch[m d]", 3, "a name must be used once, and not be row_begin, scratch"),
    (HEAD, "//   out out[m d]\n//   in a[m d], b?[m d]\n", "", 1, "must have operands"),
    (HEAD, "flops m * d", "flops m * rows", 4, "a name in an expression must be one of d, inputs, item"),
    (HEAD, "//   flops m", "//  scratch 4\n//   flops m", 4, "must be `//`, three spaces and text"),
    (HEAD, "//   flops m", "//\n//   flops m", 4, "must be `//`, three spaces and text; got '//'"),
    (HEAD, "flops m * d", "flops m *", 4, "an expression must be valid Python; got 'm *'"),
    (HEAD, "flops m * d", "flops [m]", 4, "must consist of arithmetic"),
    (HEAD, "flops m * d", "flops log(m)", 4, "a function must be one of abs"),
    (HEAD, "flops m * d", "flops m.bit_length()", 4, "a function must be one of"),
    (HEAD, "flops m * d", "scratch a.width\n//   flops 0", 4, "must be one of a.cols, a.rows"),
    (HEAD, "flops m * d", "let m d\n//   flops 0", 4, "as `let name = expression`"),
    (HEAD, "flops m * d", "let n = m\n//   flops m", 4, "a name must be used; got 'n'"),
    (HEAD, "flops m * d", "float a b\n//   flops 0", 4, "a float must be written name or name..."),
    (HEAD, "flops m * d", "float x...\n//   flops 0", 4, "a list of floats must be double"),
    (HEAD, "flops m * d", "double x..., y\n//   flops 0", 4, "a list of floats must be the last"),
    (HEAD, "flops m * d", "flag on...\n//   flops 0", 4, "a flag must be one truth value"),
    (HEAD, "flops m * d", "int n=size(a)\n//   flops 0", 4, "an integer must be written name"),
    (
        HEAD,
        "flops m * d",
        "int n=count(a)\n//   flops 0",
        4,
        "count(...) must name a list of operands; got 'a'",
    ),
    (HEAD, "flops m * d", "int n=f32(c)\n//   flops 0", 4, "f32(...) must name an operand that is no list"),
    (HEAD, "flops m * d", "each m k\n//   flops 0", 4, "`each` must name sizes of operands"),
    (LISTS, "//   double rest...", "//   within cuts a", 5, "must name the kernel's only list of integers"),
    (HEAD, "flops m * d", "internal\n//   flops 0", 4, "`internal` must say why"),
    (
        HEAD,
        "flops m * d",
        "require m > n\n//   flops 0",
        4,
        "a name in an expression must be one of a.cols, a.rows",
    ),
    (HEAD, "flops m * d", "require m >\n//   flops 0", 4, "an expression must be valid Python"),
    (LISTS, "2*cuts*count", "2*cats", 4, "a product of numbers and earlier integers; got 'cats'"),
    (LISTS, "(2*cuts*count)", ", last...", 4, "a list of integers must have a length unless it is the last"),
    (LISTS, "(2*cuts*count)", "(2), n", 4, "lists of integers must follow all other integers; got 'n'"),
    (LISTS, "w...[n k*]", "w[n k], x...[n k*]", 3, "lists of operands must be adjacent; got 'x'"),
    (LISTS, "len(range)", "len(a)", 8, "a name in an expression must be one of"),
    (LISTS, "out.cols", "a.cols", 8, "a name in an expression must be one of"),
]


@pytest.fixture(scope="module")
def declarations():
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("declarations", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["declarations"] = module  # its dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def source_of(folder, text, headers=()):
    """A folder of native sources with one family, `mine`, and headers."""
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels" / "mine.cc").write_text(text)
    for name, content in headers:
        (folder / "kernels" / name).write_text(content)
    return folder


def generated(folder):
    """The exit status and messages of the program."""
    command = [sys.executable, str(PROGRAM), str(folder), str(folder / "out"), "mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def declared(folder):
    """The specifications in the module that the program writes."""
    assert generated(folder) == (0, "")
    names: dict = {}
    exec((folder / "out" / "declared.py").read_text(), names)
    return {fields["base"]: declared_spec(fields) for fields in names["DECLARED"]}


@pytest.mark.parametrize("text,old,new,line,message", MISTAKES, ids=[m[2].strip()[:30] for m in MISTAKES])
def test_a_mistake_is_named_with_its_line(declarations, tmp_path, text, old, new, line, message):
    """Each rule of the grammar: the error has the file, the line, the rule, and what breaks it."""
    assert text.count(old) >= 1
    source_of(tmp_path, "\n" + text.replace(old, new, 1))
    with pytest.raises(declarations.DeclarationError) as raised:
        declarations.python_module([declarations.read_source(tmp_path, "mine")])
    place, _, rest = str(raised.value).partition(": error: ")
    assert place == f"{tmp_path}/kernels/mine.cc:{line + 1}" and message in rest


def test_correct_declarations_have_no_mistake(declarations, tmp_path):
    """The twin: the declarations that the mistakes are made in."""
    for text in (HEAD, LISTS):
        source_of(tmp_path, text)
        assert declarations.python_module([declarations.read_source(tmp_path, "mine")])


def test_the_build_fails_with_every_mistake(tmp_path):
    """The program writes nothing, and prints the first mistake of a source like a compiler."""
    source_of(tmp_path, HEAD.replace("out[m d]", "out[m]"))
    status, messages = generated(tmp_path)
    assert status == 1 and messages.startswith(
        f"{tmp_path}/kernels/mine.cc:2: error: an operand's size must be"
    )
    assert not (tmp_path / "out").exists()
    source_of(tmp_path, HEAD + "\n" + HEAD)
    assert (
        "a kernel must be declared once, but mine.cc:1 declares it too; got 'mix_f32'"
        in generated(tmp_path)[1]
    )
    source_of(tmp_path, "// no kernel\n")
    assert "must declare kernels; got 'mine'" in generated(tmp_path)[1]


def test_files_keep_their_time_unless_they_change(tmp_path):
    """So that the build compiles only what changed."""
    source_of(tmp_path, HEAD)
    declared(tmp_path)
    paths = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.name for path in paths} == {"mine.h", "mine_entries.h", "families.h", "declared.py"}
    times = {path: path.stat().st_mtime_ns for path in paths}
    source_of(tmp_path, HEAD.replace("flops m", "flops 2 * m"))
    assert declared(tmp_path)["mix"].flops({"m": 3, "d": 5}) == 30
    assert [path.name for path in paths if path.stat().st_mtime_ns != times[path]] == ["declared.py"]


def test_expressions_use_names_functions_and_headers(tmp_path):
    """`let` lines build on earlier ones; functions come from the source and from headers that it includes."""
    text = """#include "kernels/shared.h"
// define twice(n) = 2 * n
// kernel mix
//   out out:f32[m d]
//   in x:f32...[m d*]
//   int num=count(x), cuts, range...(2*cuts)
//   let area = m * d
//   let more = area +
//       d
//   flops more if cuts else area
//   bytes 0
//   let steps = sum(end - begin for begin, end in zip(range[::2], range[1::2]))
//   scratch twice(rounded(steps, 64)) + bit_length(num) + out.cols
"""
    header = "// define rounded(n, unit) = -(-n // unit) *\n//     unit\n"
    source_of(tmp_path, text, [("shared.h", header)])
    spec = declared(tmp_path)["mix"]
    assert spec.names == ("mix",) and {*spec.dims} == {"m", "d", "cuts", "item"}
    assert spec.flops({"m": 3, "d": 5, "cuts": 1}) == 20 and spec.flops({"m": 3, "d": 5, "cuts": 0}) == 15
    ints = {"num": 4, "cuts": 2, "range": [0, 10, 10, 65]}
    assert spec.scratch(ints, {"out": (2, 7)}) == 2 * 128 + 3 + 7


def test_the_short_form_is_short_for_the_long_one(tmp_path):
    """All operands are [m d], and each is moved once."""
    source_of(tmp_path, "// kernel scale  f32 bf16: out out, in x, float factor, 1 flop per element\n")
    short = declared(tmp_path)["scale"]
    long = HEAD.replace("mix", "scale").replace("in a[m d], b?[m d]", "in x[m d]\n//   float factor")
    source_of(tmp_path, long.replace("bytes 3", "bytes 2"))
    spelled = declared(tmp_path)["scale"]
    sizes = {"m": 3, "d": 5, "item": 2}
    for spec in (short, spelled):
        assert spec.flops(sizes) == 15 and spec.bytes(sizes) == 60 and spec.floats == ("factor",)
    assert short.operands == spelled.operands


def test_the_table_has_the_kernels_of_the_sources(declarations):
    """What is installed was made from the sources next to these tests."""
    sources = [declarations.read_source(ROOT / "native", family) for family in FAMILIES]
    names: dict = {}
    exec(declarations.python_module(sources), names)
    installed = [spec for spec in KERNELS.values() if is_declared(spec.base)]  # without those of users
    assert [fields["names"] for fields in names["DECLARED"]] == [spec.names for spec in installed]
    assert [declared_spec(fields).operands for fields in names["DECLARED"]] == [
        spec.operands for spec in installed
    ]
