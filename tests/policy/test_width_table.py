"""The table of devices in docs/models.md is the one that its script prints."""

from __future__ import annotations

import runpy
from pathlib import Path

from tilewise.models.widths import default_k_splits, widths_of_heads

ROOT = Path(__file__).parents[2]


def test_table_is_what_the_script_prints():
    """Every published model can be shared by two devices or more."""
    script = runpy.run_path(str(ROOT / ".ci" / "width_table.py"))
    lines = script["table"]()
    page = (ROOT / "docs" / "models.md").read_text()
    assert "\n".join(lines) in page
    assert all(len(widths_of_heads(heads, kv_heads)) > 1 for _, _, heads, kv_heads in script["MODELS"])


def test_k_splits_follow_from_the_model():
    """8 wherever devices can share heads; otherwise with the odd factor of the KV heads."""
    assert [default_k_splits(*heads) for heads in ((32, 8), (9, 3), (15, 5), (7, 7), (14, 2), (33, 11))] == [
        8, 12, 10, 8, 8, 11
    ]  # fmt: skip
