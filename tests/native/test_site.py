"""`make docs`: the site is built strictly, has every exported name, its pictures and its headers; broken links fail."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "tilewise",
    "tilewise.runtime",
    "tilewise.observe",
    "tilewise.models",
    "tilewise.encode",
    "tilewise.generate",
    "tilewise.train",
    "tilewise.optim",
]
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


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_has_every_exported_name(site, package):
    """A heading for each name in `__all__`, and something to read below it."""
    page = (site / "reference" / f"{package}.html").read_text(encoding="utf-8")
    headings = set(re.findall(r"<h2[^>]*>\s*(?:<span[^>]*>)?([\w.]+)", page))
    assert set(importlib.import_module(package).__all__) <= headings


def test_headers_and_pictures_are_there(site):
    """C and C++ as installed; a curve, a report and a graph that this build drew."""
    assert "pto_runtime_open" in (site / "reference" / "c.html").read_text(encoding="utf-8")
    assert "TaskHandle" in (site / "reference" / "cpp.html").read_text(encoding="utf-8")
    page = (site / "pictures.html").read_text(encoding="utf-8")
    assert "flowchart TD" in page
    named = re.findall(r'(?:src|href)="(pictures/[\w.]+)"', page)
    assert {Path(name).suffix for name in named} == {".png", ".svg", ".html"}
    assert all((site / name).stat().st_size > 1000 for name in named)


def test_pages_fetch_nothing(site):
    """No style, script, font or picture comes from elsewhere."""
    fetched = re.compile(r'<(?:link|script|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//')
    assert not [
        page.name for page in site.rglob("*.html") if fetched.search(page.read_text(encoding="utf-8"))
    ]


def test_a_broken_link_fails(tmp_path):
    """A link to a page that is not there ends the build: the check can fail."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "glossary.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[more](no_such_page.md)\n", encoding="utf-8")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = tmp_path / "mkdocs.yml"
    config.write_text(text.replace("[.ci/", f"[{ROOT}/.ci/"), encoding="utf-8")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "no_such_page.md" in done.stdout + done.stderr
