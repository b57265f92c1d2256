"""The Python blocks of docs/runtime.md, docs/runtime_numba.md and docs/tiles.md run in order, in one namespace each."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("page", "num_blocks"), [("runtime.md", 10), ("runtime_numba.md", 5), ("tiles.md", 6)]
)
def test_every_block_of_the_page_runs(page, num_blocks):
    """Every assertion of the page holds."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= num_blocks
    namespace: dict[str, object] = {"__name__": page}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/{page}, block {number}", "exec"), namespace)
