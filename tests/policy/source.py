"""The files of the repository and their syntax trees, for policy tests."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tilewise"
NATIVE = ROOT / "native"


def python_files(*folders: str) -> list[Path]:
    """All Python files below some folders."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    )


def native_files() -> list[Path]:
    """All C++ files."""
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in {".h", ".cc"})


@cache
def tracked_files() -> list[Path]:
    """All tracked files and untracked ones that git does not ignore; skips the test without a repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git, and a clone instead of an archive")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def relative(path: Path) -> str:
    """The path relative to the repository."""
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Every import in a file: line, module, names (empty for `import module`)."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            yield (
                node.lineno,
                "." * node.level + (node.module or ""),
                tuple(alias.name for alias in node.names),
            )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()


def exported(path: Path) -> list[str] | None:
    """The names in a file's `__all__`; None without one."""
    for node in tree_of(path).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        value = getattr(node, "value", None)
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets) and value is not None:
            return list(ast.literal_eval(value))
    return None
