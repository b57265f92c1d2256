"""Adds generated pages to the site that `mkdocs build` makes from docs/.

This is a hook of mkdocs.yml. It adds the Markdown files at the repository's root, a reference page
for each public package (from its `__all__` and docstrings), the C and C++ headers, the pictures
(docs_pictures.py runs small programs) and the script that makes the search box work from a file.
No generated page is kept in the repository. The build is strict: it fails on broken links, on pages
missing from the menu and on docstrings that describe arguments that do not exist.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from docs_pictures import make_pictures
from mkdocs.structure.files import File, Files

import tilewise
from tilewise.ir.fields import OperandField

ROOT = Path(__file__).parents[1]
OPENING = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md",
           "CHANGELOG.md": "CHANGELOG.md", "LICENSE": "LICENSE.txt",
           "examples/train.toml": "examples/train.toml",
           "examples/recipes/make_data.py": "examples/recipes/make_data.py"}  # fmt: skip
PACKAGES = ["tilewise", "tilewise.nn", "tilewise.optim", "tilewise.models", "tilewise.models.llama", "tilewise.session",
            "tilewise.data", "tilewise.train", "tilewise.checkpoint", "tilewise.generate", "tilewise.serve",
            "tilewise.server", "tilewise.encode", "tilewise.runtime", "tilewise.observe", "tilewise.comm",
            "tilewise.tiles", "tilewise.ir.counts", "tilewise.core.errors"]  # fmt: skip
NO_OPERATIONS = {
    "all_or_nothing",
    "find",
    "freeze",
    "has",
    "output_id",
    "thaw",
}  # methods of a graph builder that add no operation


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file of the site that is not in docs/."""

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    for source, page in OPENING.items():
        add(page, move_links((ROOT / source).read_text(encoding="utf-8"), from_root=True))
    documented: dict[str, str] = {}  # where a name is defined: the package whose page has it
    for name in PACKAGES:
        add(f"reference/{name}.md", reference_page(name, documented))
    add("reference/operations.md", operations_page())
    add("reference/c.md", header_page("C", "the standard is C99 or later", ["pto_api.h", "tile.h"]))
    add(
        "reference/cpp.md",
        header_page(
            "C++", "the standard is C++20", ["pto.hpp", "pto/params.hpp", "pto/tasks.hpp", "tile.hpp"]
        ),
    )
    for path, content in make_pictures().items():
        add(path, content)
    add("assets/iframe-worker.js", (ROOT / ".ci" / "iframe-worker.js").read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Make links from docs/ to files at the repository's root work on the site."""
    return markdown if page.file.generated_by else move_links(markdown, from_root=False)


def move_links(markdown: str, from_root: bool) -> str:
    """Rewrite links of the repository as links of the site, whose root is docs/."""

    def moved(match: re.Match[str]) -> str:
        target = match[1].removeprefix("docs/") if from_root else match[1].removeprefix("../")
        return f"]({OPENING.get(target, target)})"

    return re.sub(r"\]\(([^)#:\s]+)\)", moved, markdown)


def homes_of(package: str) -> dict[str, str]:
    """Where each exported name of a package is defined, read from the package's imports."""
    module = importlib.import_module(package)
    homes = {name: f"{package}.{name}" for name in module.__all__}
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {a.name: f"{node.module}.{a.name}" for a in node.names if a.name in homes}
    return homes


def settings_table(place: str) -> str:
    """A table of the settings that a class declares (`tilewise.settings`); empty for anything else."""
    module, _, name = place.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None)
    is_group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    if not is_group or not any("setting" in one.metadata for one in dataclasses.fields(kind)):
        return ""
    rows = [
        f"| `{one.name}` | {one.written_default} | {one.range_text} | {one.help.replace('|', '&#124;')} |\n"
        for one in importlib.import_module("tilewise.settings").settings_of(kind).values()
    ]
    return "| setting | default | range | meaning |\n|---|---|---|---|\n" + "".join(rows)


def reference_page(package: str, documented: dict[str, str]) -> str:
    """A page with a package's docstring and its exported names.

    A name that an earlier page documents becomes a link to that page.
    """
    text = str(importlib.import_module(package).__doc__).strip()
    parts = [f"# {package}\n\n{text}\n"]
    for name, home in sorted(homes_of(package).items()):
        if home in {"tilewise.comm", "tilewise.models", "tilewise.optim"}:
            parts.append(f"## {name}\n\nA package of its own.\n")
        elif documented.setdefault(home, package) != package:
            first = documented[home]
            parts.append(f"## {name}\n\nSee [{first}]({first}.md).\n")
        else:
            parts.append(f"::: {home}\n    options:\n      heading: {name}\n")
            parts.append(settings_table(home))
    return "\n".join(parts)


def operations_page() -> str:
    """A page with the methods of a graph that declare tensors or add operations, and all registered operations."""
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
        "## All registered operations\n\nThe methods above add some of these; gradients, optimizers and graph "
        "passes add the others. "
        "`graph.op(name, [tensors], **attributes)` adds any by name. Operands are in the order of the list; "
        "an operand in parentheses may be None. Equal names of dims are equal sizes, and `...` stands for any "
        "dims in front.\n\n"
        "| operation | operands | attributes | meaning |\n|---|---|---|---|"
    )
    for name, op in sorted(importlib.import_module("tilewise.ir.op").registered_ops().items()):
        operands = ", ".join(map(_operand, op.declared.operands))
        attributes = ", ".join(f"`{key}: {kind.__name__}`" for key, kind in op.declared.attributes.items())
        meaning = " ".join((inspect.getdoc(op) or "").partition("\n\n")[0].split()).replace("|", "\\|")
        parts.append(f"| `{name}` | {operands} | {attributes} | {meaning} |")
    return "\n".join(parts) + "\n"


def _operand(field: OperandField) -> str:
    """An operand with its dims, as a cell of the table of operations."""
    text = f"`{field.name}[{', '.join(field.dims.split())}]`" + (", …" if field.is_list else "")
    return f"({text})" if field.is_optional else text


def header_page(language: str, standard: str, headers: list[str]) -> str:
    """A page with the installed headers of the task runtime."""
    folder = Path(tilewise.get_include()) / "tilewise"
    parts = [
        f"# The task runtime for {language}\n\n[Tasks in Python](../runtime.md) explains the model and how programs "
        f"are built; {standard}. `tilewise.get_include()` names the folder of these headers.\n"
    ]
    for header in headers:
        code = (folder / header).read_text(encoding="utf-8")
        parts.append(f"## tilewise/{header}\n\n```{'c' if header.endswith('.h') else 'cpp'}\n{code}```\n")
    return "\n".join(parts)
