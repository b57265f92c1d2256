"""Entries of what users read and of what lives inside a template never stand for each other."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import config, training_graph


@pytest.mark.parametrize("microbatches", [8, 16])
def test_parts_of_microbatches_are_their_own(microbatches):
    """A tensor with a part per microbatch has its parts side by side, whatever the variants' tensors are numbered."""
    plan = training_graph(config(), "f32").plan({}, leaves=16, accumulation=microbatches)
    (entries,) = (of.entries for of in plan.program.classes)
    checked = 0
    for parts in plan.outside.values():
        offsets = [entries[e].offset for e in parts]
        if len(parts) > 1:
            assert {b - a for a, b in pairwise(offsets)} == {offsets[1] - offsets[0]}
            checked += 1
    assert checked >= 3
