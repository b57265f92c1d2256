"""The Python of docs/sharding.md runs in order in one namespace and prints the page's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from native.session.printed_pages import BLOCK, differences

PAGE = Path(__file__).parents[3] / "docs" / "sharding.md"


@pytest.mark.slow
def test_every_block_prints_what_the_page_shows(tmp_path, monkeypatch):
    """Memory, names, transfers; equal losses with any recomputation; and pictures."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert len(BLOCK.findall(text)) == text.count("```python") and text.count("```text") >= 3
    assert {path.name for path in tmp_path.iterdir()} == {"before.html", "after.html", "passes.csv"}


@pytest.mark.slow
def test_a_wrong_page_is_detected(tmp_path, monkeypatch):
    """The twin: the block of a wrong number is found."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    assert "each: 0.00 MiB" in text
    assert differences(PAGE.name, text.replace("each: 0.00 MiB", "each: 0.01 MiB")) == [15]
