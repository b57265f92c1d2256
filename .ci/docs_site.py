"""What `mkdocs build` makes besides the pages of docs/: the repository's opening files, the reference, the pictures.

A hook of mkdocs.yml. The reference is written from what packages export (`__all__`) and from their docstrings, the C
and C++ pages from the installed headers, the pictures by running small programs (docs_pictures.py). Nothing of it is
kept in the repository. Refuses, because the build is strict: links to nowhere, pages in no menu, docstrings that name
arguments that are not there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from docs_pictures import make_pictures
from mkdocs.structure.files import File, Files

import tilewise

ROOT = Path(__file__).parents[1]
OPENING = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md",
           "CHANGELOG.md": "CHANGELOG.md", "LICENSE": "LICENSE.txt"}  # fmt: skip
PACKAGES = ["tilewise", "tilewise.nn", "tilewise.optim", "tilewise.models", "tilewise.models.llama", "tilewise.session",
            "tilewise.data", "tilewise.train", "tilewise.checkpoint", "tilewise.generate", "tilewise.serve",
            "tilewise.server", "tilewise.encode", "tilewise.runtime", "tilewise.observe", "tilewise.ir.counts",
            "tilewise.core.errors"]  # fmt: skip
NO_OPERATIONS = {
    "all_or_nothing",
    "find",
    "freeze",
    "has",
    "output_id",
    "thaw",
}  # methods of a builder that add none


def on_files(files: Files, *, config: Any) -> Files:
    """Add all that is not a page of docs/."""

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    for source, page in OPENING.items():
        add(page, move_links((ROOT / source).read_text(encoding="utf-8"), from_root=True))
    documented: dict[str, str] = {}  # where each name is defined, and the package on whose page it stands
    for name in PACKAGES:
        add(f"reference/{name}.md", reference_page(name, documented))
    add("reference/operations.md", operations_page())
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


def reference_page(package: str, documented: dict[str, str]) -> str:
    """A package's docstring and everything that it exports; a name that an earlier page has is a link to it."""
    text = str(importlib.import_module(package).__doc__).strip()
    parts = [f"# {package}\n\n{text}\n"]
    for name, home in sorted(homes_of(package).items()):
        if home in {"tilewise.models", "tilewise.optim"}:
            parts.append(f"## {name}\n\nA package of its own.\n")
        elif documented.setdefault(home, package) != package:
            first = documented[home]
            parts.append(f"## {name}\n\nSee [{first}]({first}.md).\n")
        else:
            parts.append(f"::: {home}\n    options:\n      heading: {name}\n")
    return "\n".join(parts)


def operations_page() -> str:
    """Every method of a graph that declares a tensor or adds an operation, then every registered operation."""
    builder = importlib.import_module("tilewise.graph").GraphBuilder
    parts = [
        "# Operations of a graph\n\nA `ComputeGraph` has a method per operation. Each returns the tensors that the "
        "operation makes; shapes, dtypes and labels follow from its operands.\n"
    ]
    for name, method in inspect.getmembers(builder, inspect.isfunction):
        if not name.startswith("_") and name not in NO_OPERATIONS:
            parts.append(
                f"::: {method.__module__}.{method.__qualname__}\n    options:\n      heading: {name}\n"
            )
    parts.append(
        "## All registered operations\n\nMethods add the first ones; gradients, optimizers and passes add the others. "
        "`graph.op(name, [tensors], **attributes)` adds any by name.\n\n"
        "| operation | attributes | meaning |\n|---|---|---|"
    )
    for name, op in sorted(importlib.import_module("tilewise.ir.op").registered_ops().items()):
        given = op.signature.attributes.items()
        attributes = ", ".join(f"`{key}: {kind.__name__}`" for key, kind in given)
        meaning = " ".join((inspect.getdoc(type(op)) or "").partition("\n\n")[0].split()).replace("|", "\\|")
        parts.append(f"| `{name}` | {attributes} | {meaning} |")
    return "\n".join(parts) + "\n"


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
