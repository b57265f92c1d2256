"""The blocks of docs/running.md and docs/from_nntile.md run in order."""

import re
import weakref
from pathlib import Path

import pytest

from tilewise.core import open_objects

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(autouse=True)
def _no_other_open_objects(monkeypatch):
    """A page's `shutdown` closes only what the page opened."""
    monkeypatch.setattr(open_objects, "_open", weakref.WeakValueDictionary())


@pytest.mark.parametrize("page,least", [("running.md", 8), ("from_nntile.md", 1)])
def test_every_block_of_the_page_runs(page, least):
    """Every assertion of the page holds."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= least
    namespace: dict[str, object] = {"__name__": page}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/{page}, block {number}", "exec"), namespace)
