"""Entries that users read and those inside a template are never confused."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import config, training_graph


@pytest.mark.parametrize("microbatches", [8, 16])
def test_parts_of_microbatches_are_bound_alike(microbatches):
    """A tensor with a part per microbatch has its parts bound alike, whatever numbers variants and tensors have."""
    plan = training_graph(config(), "f32").plan({}, batch_splits=16, accumulation=microbatches)
    (of,) = plan.program.classes
    bound = Counter(entry for call in of.calls["step"] for entry in call.binding)
    checked = 0
    for parts in plan.outside.values():
        if len(parts) > 1:
            assert len({bound[e] for e in parts}) == 1, {e: bound[e] for e in parts}
            checked += 1
    assert checked >= 3
