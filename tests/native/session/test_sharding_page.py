"""docs/sharding.md cannot rot: its Python runs in order in one namespace, and prints what stands below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from native.session.printed_pages import BLOCK, differences

PAGE = Path(__file__).parents[3] / "docs" / "sharding.md"


@pytest.mark.slow
def test_every_block_prints_what_the_page_shows(tmp_path, monkeypatch):
    """Memory, names, transfers; the same losses whatever runs again; and pictures."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert len(BLOCK.findall(text)) == text.count("```python") and text.count("```text") >= 3
    assert {path.name for path in tmp_path.iterdir()} == {"before.html", "after.html"}


@pytest.mark.slow
def test_another_number_is_noticed(tmp_path, monkeypatch):
    """The twin: of a page that says something else, the block is found."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    assert "each: 0.00 MiB" in text
    assert differences(PAGE.name, text.replace("each: 0.00 MiB", "each: 0.01 MiB")) == [9]
