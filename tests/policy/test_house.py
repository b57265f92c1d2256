"""Docstrings, leftovers, documented folders and environment variables, a light import."""

import ast
import re
import subprocess
import sys

from policy.source import NATIVE, PACKAGE, ROOT, native_files, python_files, relative, tree_of

HEAVY = "torch transformers matplotlib pydantic tokenizers safetensors huggingface_hub jinja2 typer rich"
CALLED = re.compile(r"\[[&=\w, ]*\]\((?:auto at\b|const auto[&*])[^()]*\)\s*\{")  # nothing inlines it
LEFTOVERS = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")


def _code_files():
    folders = [name for name in ("src", "tests", "examples", "benchmarks", ".ci") if (ROOT / name).is_dir()]
    suffixes = {".c", ".cc", ".cpp", ".h", ".hpp"}
    roots = [ROOT / name for name in (*folders, "native")]
    others = [path for root in roots for path in root.rglob("*") if path.suffix in suffixes]
    return python_files(*folders) + others


def test_test_folders_mirror_sources():
    """tests/pure and tests/native have only folders of src/tilewise and native."""
    sources = {path.name for root in (PACKAGE, NATIVE) for path in root.iterdir() if path.is_dir()}
    folders = [
        path for kind in ("pure", "native") for path in (ROOT / "tests" / kind).iterdir() if path.is_dir()
    ]
    assert not [
        relative(path) for path in folders if path.name not in sources | {"benchmarks", "__pycache__"}
    ]


def test_every_python_file_has_a_docstring():
    """Every Python file has a docstring."""
    assert not [
        relative(path) for path in python_files("src", "tests") if ast.get_docstring(tree_of(path)) is None
    ]


def test_every_native_file_begins_with_a_comment():
    """Every C++ file opens with a comment."""
    assert not [
        relative(path)
        for path in native_files()
        if not path.read_text(encoding="utf-8").startswith(("//", "/*"))
    ]


def test_lambdas_over_columns_are_inlined():
    """A call would pass vectors through memory: sums in bf16 took 1.4 times as long."""
    assert CALLED.search("each_column(d, [&](auto at) { f(at); })")
    files = [path for path in native_files() if path.is_relative_to(NATIVE / "kernels")]
    kernels = [path for path in files if not path.name.endswith("_test.cc")]
    assert kernels
    assert not [relative(path) for path in kernels if CALLED.search(path.read_text(encoding="utf-8"))]


def test_every_test_has_a_docstring():
    """Every test has a docstring."""
    bad = [
        f"{relative(path)}:{node.lineno}: {node.name}"
        for path in python_files("tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not bad, "tests without docstring:\n" + "\n".join(bad)


def test_no_reminders():
    """The code has no reminders; open work is tracked as issues."""
    pattern = re.compile(r"\b(" + "|".join(LEFTOVERS) + r")\b")
    bad = [relative(path) for path in _code_files() if pattern.search(path.read_text(encoding="utf-8"))]
    assert not bad


def test_background_threads_are_stopped_at_exit():
    """Only `BackgroundThread` makes daemon threads, except processes that end without finalizing
    the interpreter, and timers that run only Python.
    """
    may = {
        "processes/threads.py",
        "processes/workers.py",
        "distributed/worker.py",
        "server/link/engine_process.py",
        "comm/world.py",
        "graph/parallel/progress.py",
    }
    pattern = re.compile(r"\bdaemon\s*=\s*True")
    starters = {
        path.relative_to(PACKAGE).as_posix()
        for path in python_files("src")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert starters == may


def _folders():
    """Folders with sources, in the notation of docs/layout.md."""
    roots = [PACKAGE, NATIVE, *(ROOT / name for name in ("tests", "benchmarks", "examples", "docs"))]
    for root in roots:
        yield root
        inner = [path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__"]
        depth = 1 if root.name == "tests" else 9
        yield from (
            path for path in inner if len(path.relative_to(root).parts) <= depth and any(path.glob("*.*"))
        )


def test_every_folder_is_in_the_layout():
    """docs/layout.md mentions every folder of sources."""
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    missing = [f"{relative(path)}/" for path in _folders() if f"`{relative(path)}/`" not in text]
    assert not missing, "not in docs/layout.md: " + ", ".join(missing)


def test_every_folder_of_the_layout_exists():
    """docs/layout.md mentions no folder that is not there."""
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|native|tests|benchmarks|examples|docs|\.ci)/[\w/.]*)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_environment_variables_are_documented():
    """The variables of the code and of docs/environment.md are the same."""
    from tilewise.core import VARIABLES

    used = set(VARIABLES)
    for path in native_files():
        used.update(re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == used


def test_environment_is_read_in_one_place():
    """In Python only core/environment.py reads the environment, and a file that runs without the package."""
    may = [PACKAGE / "core" / "environment.py", PACKAGE / "cli" / "launch" / "stand_in.py"]
    pattern = re.compile(r"\bos\.(environ|getenv)\b")
    bad = [
        relative(path)
        for path in python_files("src")
        if path not in may and pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert not bad


def test_import_is_light():
    """`import tilewise` loads no heavy package, and no part that runs models."""
    script = f"import sys, tilewise; print(sorted(set('{HEAVY}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
