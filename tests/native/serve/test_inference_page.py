"""The Python examples of docs/inference.md run in order in one namespace, with a small model."""

import re
from pathlib import Path

from native.serve.serving_models import save_model

PAGE = Path(__file__).parents[3] / "docs" / "inference.md"


def test_every_block_of_the_page_runs(tmp_path, capsys):
    """Every assertion on the page holds."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {"__name__": PAGE.name, "MODEL": str(save_model(tmp_path / "model"))}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/inference.md, block {number}", "exec"), namespace)
    assert re.search(r"^'import os' \d+ (length|stop)$", capsys.readouterr().out, re.MULTILINE)
