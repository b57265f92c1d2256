"""The Python of docs/policies.md runs in order in one namespace and prints the page's output."""

from __future__ import annotations

from pathlib import Path

from native.session.printed_pages import BLOCK, differences

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


def test_every_block_prints_what_the_page_shows():
    """Entries, tiles and workers; a wrong output is detected."""
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert len(BLOCK.findall(text)) == text.count("```python")
    assert differences(PAGE.name, text.replace("tile 4: device 0", "tile 4: device 1")) == [2]
