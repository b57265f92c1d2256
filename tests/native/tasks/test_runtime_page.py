"""docs/runtime.md and docs/runtime_numba.md cannot rot: their Python blocks run in order, in one namespace each."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "num_blocks"), [("runtime.md", 10), ("runtime_numba.md", 5)])
def test_every_block_of_the_page_runs(page, num_blocks):
    """The page's examples do what the page says: every assertion in them holds."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= num_blocks
    namespace: dict[str, object] = {"__name__": page}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/{page}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", ["runtime.md", "runtime_numba.md"])
def test_files_that_the_page_names_exist(page):
    """Examples, benchmarks and tests that the page points at are where it says."""
    text = (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:examples|benchmarks|tests|native)/[\w./]+)`", text)
    missing = [name for name in named if not (DOCS.parent / name).exists()]
    assert named and not missing
