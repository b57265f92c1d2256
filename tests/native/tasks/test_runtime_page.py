"""docs/runtime.md cannot rot: its Python blocks run in order, in one namespace."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "runtime.md"


def test_every_block_of_the_page_runs():
    """The page's examples do what the page says: every assertion in them holds."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/runtime.md, block {number}", "exec"), namespace)


def test_files_that_the_page_names_exist():
    """Examples, benchmarks and tests that the page points at are where it says."""
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`((?:examples|benchmarks|tests|native)/[\w./]+)`", text)
    missing = [name for name in named if not (PAGE.parents[1] / name).exists()]
    assert named and not missing
