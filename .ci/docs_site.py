"""What `mkdocs build` makes besides the pages of docs/: the repository's opening files, the reference, the pictures.

A hook of mkdocs.yml. The reference is written from what packages export (`__all__`) and from their docstrings, the C
and C++ pages from the installed headers, the pictures by running small programs (docs_pictures.py). Nothing of it is
kept in the repository. Refuses, because the build is strict: links to nowhere, pages in no menu, docstrings that name
arguments that are not there.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

from docs_pictures import make_pictures
from mkdocs.structure.files import File, Files

import tilewise

ROOT = Path(__file__).parents[1]
OPENING = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md",
           "CHANGELOG.md": "CHANGELOG.md", "LICENSE": "LICENSE.txt"}  # fmt: skip
PACKAGES = ["tilewise", "tilewise.models", "tilewise.encode", "tilewise.optim", "tilewise.train", "tilewise.generate",
            "tilewise.serve", "tilewise.server", "tilewise.runtime", "tilewise.observe",
            "tilewise.core.errors"]  # fmt: skip


def on_files(files: Files, *, config: Any) -> Files:
    """Add all that is not a page of docs/."""

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    for source, page in OPENING.items():
        add(page, move_links((ROOT / source).read_text(encoding="utf-8"), from_root=True))
    for name in PACKAGES:
        add(f"reference/{name}.md", reference_page(name))
    add("reference/c.md", header_page("C", "the standard is C99 or later", ["pto_api.h"]))
    add(
        "reference/cpp.md",
        header_page("C++", "the standard is C++20", ["pto.hpp", "pto/params.hpp", "pto/tasks.hpp"]),
    )
    for path, content in make_pictures().items():
        add(path, content)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links of docs/ to the files beside it."""
    return markdown if page.file.generated_by else move_links(markdown, from_root=False)


def move_links(markdown: str, from_root: bool) -> str:
    """Links as they are in the repository become links of the site, where docs/ is the root."""

    def moved(match: re.Match[str]) -> str:
        target = match[1].removeprefix("docs/") if from_root else match[1].removeprefix("../")
        return f"]({OPENING.get(target, target)})"

    return re.sub(r"\]\(([^)#:\s]+)\)", moved, markdown)


def homes_of(package: str) -> dict[str, str]:
    """Where each exported name is defined, as the package's own imports say."""
    module = importlib.import_module(package)
    homes = {name: f"{package}.{name}" for name in module.__all__}
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {a.name: f"{node.module}.{a.name}" for a in node.names if a.name in homes}
    return homes


def reference_page(package: str) -> str:
    """A package's docstring and everything that it exports."""
    text = str(importlib.import_module(package).__doc__).strip()
    parts = [f"# {package}\n\n{text}\n"]
    for name, home in sorted(homes_of(package).items()):
        if home in {"tilewise.models", "tilewise.optim"}:
            parts.append(f"## {name}\n\nA package of its own.\n")
        else:
            parts.append(f"::: {home}\n    options:\n      heading: {name}\n")
    return "\n".join(parts)


def header_page(language: str, standard: str, headers: list[str]) -> str:
    """Headers of the task runtime as they are installed."""
    folder = Path(tilewise.get_include()) / "tilewise"
    parts = [
        f"# The task runtime for {language}\n\n[Tasks by hand](../runtime.md) explains the model and how programs "
        f"are built; {standard}. `tilewise.get_include()` names the folder of these headers.\n"
    ]
    for header in headers:
        code = (folder / header).read_text(encoding="utf-8")
        parts.append(f"## tilewise/{header}\n\n```{'c' if header.endswith('.h') else 'cpp'}\n{code}```\n")
    return "\n".join(parts)
