"""`make docs`: the site is built strictly, with every exported name, pictures and headers; broken
links are errors.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.ir.op import registered_ops

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a configuration into a folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def headings(page: Path) -> set[str]:
    """The names with a heading on a page of the reference."""
    return set(re.findall(r"<h2[^>]*>\s*(?:<span[^>]*>)?([\w.]+)", page.read_text(encoding="utf-8")))


def test_reference_has_every_exported_name(site):
    """A heading for each name in `__all__` of every package on the site, including those that examples import."""
    pages = {page.stem: headings(page) for page in (site / "reference").glob("tilewise*.html")}
    for package, names in pages.items():
        assert set(importlib.import_module(package).__all__) <= names, package
    imported = [
        line.split() for path in (ROOT / "examples").glob("*.py") for line in path.read_text().splitlines()
    ]
    modules = {words[1] for words in imported if words[:1] == ["from"] and words[1].startswith("tilewise")}
    assert {"tilewise", "tilewise.nn", "tilewise.checkpoint", "tilewise.session"} | modules <= {*pages}


def test_every_operation_is_listed(site):
    """Each method of a graph that adds an operation has a heading, and each registered operation a table row."""
    page = site / "reference" / "operations.html"
    text = page.read_text(encoding="utf-8")
    assert {"input", "parameter", "matmul", "scaled_dot_product_attention", "loss"} <= headings(page)
    own = [
        name for name, op in registered_ops().items() if op.__module__.startswith("tilewise.")
    ]  # not tests'
    assert own
    assert all(f"<code>{name}</code>" in text for name in own)


def test_headers_and_pictures_exist(site):
    """C and C++ headers as installed; a curve, a report and a graph drawn by this build."""
    assert "pto_runtime_open" in (site / "reference" / "c.html").read_text(encoding="utf-8")
    assert "TaskHandle" in (site / "reference" / "cpp.html").read_text(encoding="utf-8")
    page = (site / "pictures.html").read_text(encoding="utf-8")
    assert "flowchart TD" in page
    named = re.findall(r'(?:src|href)="(pictures/[\w.]+)"', page)
    assert {Path(name).suffix for name in named} == {".png", ".svg", ".html"}
    assert all((site / name).stat().st_size > 1000 for name in named)


def test_pages_load_nothing_external(site):
    """No style, script, font or picture of another site."""
    fetched = re.compile(r'<(?:link|script|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//')
    assert not [
        page.name for page in site.rglob("*.html") if fetched.search(page.read_text(encoding="utf-8"))
    ]


def test_a_broken_link_fails(tmp_path):
    """The twin: a link to a missing page fails the build."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "glossary.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[more](no_such_page.md)\n", encoding="utf-8")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = tmp_path / "mkdocs.yml"
    config.write_text(text.replace("[.ci/", f"[{ROOT}/.ci/"), encoding="utf-8")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "no_such_page.md" in done.stdout + done.stderr
