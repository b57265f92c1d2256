"""The list of passes: docs/adding_a_pass.md runs, and every pass finds what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from native.session.printed_pages import differences
from tilewise.core.errors import PlanError
from tilewise.session.passes import GRAPH_PASSES, PASSES, run_passes

PAGE = Path(__file__).parents[3] / "docs" / "adding_a_pass.md"


def test_the_page_prints_what_it_shows():
    """Every block, in order; a wrong output is detected."""
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert differences(PAGE.name, text.replace("[session.run_passes]", "[session.run]")) == [3]


@pytest.mark.parametrize(
    "passes,number", [(passes, n) for passes in (GRAPH_PASSES, PASSES) for n in range(len(passes) - 1)]
)
def test_a_pass_before_those_that_it_needs_is_rejected(passes, number):
    """Each pass but the last gives something that a later one needs."""
    without = [one for n, one in enumerate(passes) if n != number]

    def same(laid_out, options):
        return laid_out

    with pytest.raises(PlanError, match=r"\[session.run_passes\] a pass must come after"):
        run_passes(None, None, [type(one)(same, one.needs, one.gives) for one in without])
