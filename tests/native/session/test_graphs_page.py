"""The blocks of docs/graphs.md run in order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "graphs.md"


@pytest.mark.slow
def test_every_block_of_the_page_runs(capsys):
    """Every assertion of the page holds."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    namespace: dict[str, object] = {"__name__": PAGE.name}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/graphs.md, block {number}", "exec"), namespace)
    assert "unattributed" in capsys.readouterr().out
