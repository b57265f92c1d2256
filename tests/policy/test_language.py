"""Retired words and forbidden sentence openings do not return in code, comments, docstrings or pages."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {  # what must not be written, and the field's term
    r"granules?": "KV block",
    r"couriers?": "transport",
    r"walkers?": "instruction issuer",
    r"wake words?": "task state word",
    r"kept recordings?": "instantiated graph",
    r"reduction_chunks": "k_splits",
    r"leaf by leaf": "batch split by batch split",
    r"home layouts?": "storage layout",
    r"use layouts?": "compute layout",
    r"unshard(s|ed|ing)?": "all-gather of parameters",
    r"Border": "Validator",
    r"tenants?": "live interval",
    r"signal sites?": "signal range",
    r"raises? (a|the|its|this|that) signals?": "post",
    r"foresees?": "precompile",
    r"seats?": "thread slot",
    r"told": "reported, notified, recorded",
    r"beside": "next to, compared with, alongside",
    r"(some|any|no)body": "the thread, process or user that is meant",
    r"whoever": "the thread, process or user that is meant",
    r"(?-i:(is|are) none(?! \}))": "what is absent or invalid, by name",  # not the test of a Jinja template
}
OPENINGS = re.compile(
    r"(?:^|[.!?]\s+|\"\"\"|//[/!]?\s*|#\s*)(What of|Where none|Of which|Whoever|That is what)\b"
)
LOCALS = {"found", "given", "known", "held", "kept"}  # a local has the noun of the value that it holds
ALLOWED = {
    "tests/policy/test_language.py",
    "tests/policy/test_docs_form.py",
    "src/tilewise/ir/file/fields.py",  # reads the names in files of earlier versions
}


def problems(name: str, text: str) -> list[str]:
    """Lines of a file with a retired word or a forbidden opening."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        for word, better in WORDS.items():
            if re.search(rf"(?<![\w-]){word}(?![\w-])", line, re.IGNORECASE if word.islower() else 0):
                lines.append(f"{name}:{number}: write {better!r}: {line.strip()[:80]}")
        if OPENINGS.search(line):
            lines.append(f"{name}:{number}: name the subject first: {line.strip()[:80]}")
    return lines


def locals_without_noun(name: str, text: str) -> list[str]:
    """Variables and parameters of a Python file with a name of LOCALS."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        variable = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
        if variable in LOCALS:
            lines.append(f"{name}:{node.lineno}: name what {variable!r} holds")
    return lines


def tracked() -> list[str]:
    """Every hand-written text file."""
    paths = [
        "src",
        "native",
        "tests",
        "benchmarks",
        "examples",
        "docs",
        ".ci",
        "README.md",
        "CONTRIBUTING.md",
    ]
    out = subprocess.run(
        ["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ends = (".py", ".h", ".hpp", ".cc", ".cpp", ".c", ".md", ".toml", ".txt", ".js", ".css")
    return [name for name in out.stdout.splitlines() if name.endswith(ends) and name not in ALLOWED]


def test_retired_words_do_not_return():
    """In no file of the project."""
    lines = []
    for name in tracked():
        text = (ROOT / name).read_text(encoding="utf-8")
        lines += problems(name, text)
        lines += locals_without_noun(name, text) if name.endswith(".py") else []
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    "line",
    [
        "# Of which some are kept.",
        "// a granule of attention",
        "x = graph(reduction_chunks=8)",
        "the walker stops",
        "// The next task; kNone: there is none.",
    ],
)
def test_a_retired_word_is_detected(line):
    """The twin: a comment, an opening, a keyword."""
    assert problems("x.py", line)


def test_a_local_without_a_noun_is_detected():
    """A variable and a parameter; not an attribute."""
    assert len(locals_without_noun("x.py", "def f(given): found = given.held")) == 2
