"""The Python of docs/planning.md runs in order in one namespace and prints the page's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from native.session.printed_pages import BLOCK, differences

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


def test_every_block_prints_what_the_page_shows(tmp_path, monkeypatch):
    """From the graph to the tasks, and back from a file."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert len(BLOCK.findall(text)) == text.count("```python") and text.count("```text") >= 12


@pytest.mark.parametrize(
    ("what", "instead", "block"),
    [
        ("k_splits=4\n%0", "k_splits=8\n%0", 1),
        ("'lasting': ", "'lasting': 1", 9),
        ("factor=0.03125", "factor=1.0", 1),
    ],
)
def test_a_wrong_page_is_detected(what, instead, block, tmp_path, monkeypatch):
    """The twin: another number in an output is detected, with its block."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    assert what in text
    assert block in differences(PAGE.name, text.replace(what, instead, 1))
