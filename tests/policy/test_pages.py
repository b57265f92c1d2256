"""Pages: reachable, with valid links and Python that parses."""

import ast
import re
import textwrap

from policy.source import ROOT, python_files, relative, tracked_files, tree_of

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`([a-z_]+/[a-z_0-9/]*(?:\.(?:py|h|cc))?)`")


def _pages():
    return [path for path in tracked_files() if path.suffix == ".md"]


def _targets(page):
    return {(page.parent / target).resolve() for target in LINK.findall(page.read_text(encoding="utf-8"))}


def test_every_link_is_valid():
    """Relative links of every page name existing files."""
    bad = [
        f"{relative(page)}: {target}" for page in _pages() for target in _targets(page) if not target.exists()
    ]
    assert not bad


def _lost_paths(text):
    """Files and folders in backticks that do not exist, relative to the root or to the page."""
    rooms = [ROOT, *(ROOT / r for r in ("src/tilewise", "native", "native/tasks", "native/include"))]
    paths = PATH.findall(text)
    return [p for p in paths if "." in p or p.endswith("/") if not any((room / p).exists() for room in rooms)]


def test_every_path_on_a_page_exists():
    """Except in the changelog and for a user's own files."""
    theirs = {"build/", "dist/", "pydoc_data/topics.py"}
    pages = [page for page in _pages() if page.name != "CHANGELOG.md"]
    texts = {relative(page): page.read_text("utf-8") for page in pages}
    assert sum(len(PATH.findall(text)) for text in texts.values()) > 150
    lost = {name: left for name, text in texts.items() if (left := {*_lost_paths(text)} - theirs)}
    assert not lost
    assert _lost_paths("`plan/collectives.py`, `plan/rings.py`, `plan/`, `a/b`") == ["plan/collectives.py"]


def test_every_page_is_reachable_from_the_readme():
    """By following links."""
    visited, open_pages = set(), {ROOT / "README.md"}
    while open_pages:
        page = open_pages.pop()
        visited.add(page)
        open_pages |= {target for target in _targets(page) if target.suffix == ".md"} - visited
    pages = {path for path in _pages() if path.parent in (ROOT, ROOT / "docs")}
    assert not [relative(page) for page in pages - visited]


def test_every_page_is_in_the_menu():
    """The site's menu has every page of docs/."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [
        path.name for path in _pages() if path.parent.name == "docs" and f": {path.name}\n" not in menu
    ]


def test_python_in_pages_and_docstrings_parses():
    """Every block marked as Python in pages and docstrings."""
    fence = re.compile(r"^[ ]*```python\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
    blocks = [
        (relative(page), block) for page in _pages() for block in fence.findall(page.read_text("utf-8"))
    ]
    for path in python_files("src"):
        nodes = [
            tree_of(path),
            *(n for n in ast.walk(tree_of(path)) if isinstance(n, ast.ClassDef | ast.FunctionDef)),
        ]
        blocks += [(relative(path), b) for n in nodes for b in fence.findall(ast.get_docstring(n) or "")]
    assert len(blocks) > 10
    for name, block in blocks:
        compile(textwrap.dedent(block), name, "exec")


def test_files_named_in_text_exist():
    """Files of this repository in pages, comments and docstrings."""
    named = re.compile(
        r"(?<![\w./-])((?:src|native|tests|docs|examples|benchmarks|\.ci)/[\w/.-]*\w\.(?:md|py|h|hpp|cc|cpp|toml))\b"
    )
    bad = [
        f"{relative(path)}: {name}"
        for path in tracked_files()
        if path.suffix in {".md", ".py", ".h", ".hpp", ".cc", ".cpp", ".txt", ".toml", ".yml", ""}
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists() and "CHANGELOG" not in path.name
    ]
    assert not bad


def test_rules_named_in_text_exist():
    """Numbered rules of docs/numerics.md in code and pages."""
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    rules = set(re.findall(r"^(\d+)\. ", page, re.MULTILINE))
    pointer = re.compile(r"numerics(?:\.md)?`?\)?,? (?:\([^)]*\))?,? ?rule (\d+)")
    names = [
        (relative(path), number)
        for path in tracked_files()
        if path.suffix in {".md", ".py", ".h", ".cc", ".txt"}
        for number in pointer.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(names) > 3
    assert not [(name, number) for name, number in names if number not in rules]
