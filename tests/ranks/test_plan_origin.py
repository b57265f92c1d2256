"""What a file's checks cannot know, planning again does: whether a program is that of its graph and layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tilewise as tw
from ranks.saved_plans import NAMES, make, merge_terms
from ranks.small_llama import change_first, halve_leaves, skip
from tilewise.core.errors import PlanError
from tilewise.session import require_origin


def reloaded(plan, path):
    """A plan by way of a file."""
    plan.save(path)
    return tw.Plan.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_was_made_has_its_origin(name, tmp_path):
    """Training and decoding, on one device and several: made again from the file alone, they are the same."""
    require_origin(reloaded(make(name), tmp_path / "a.plan"))


def other_numbers(plan):
    """A device asks for other rows of a shared value's parts than its own."""
    devices = list(plan.program.devices)
    numbers = list(devices[-1].numbers)
    numbers[-1] += 1
    devices[-1] = replace(devices[-1], numbers=tuple(numbers))
    return replace(plan, program=replace(plan.program, devices=tuple(devices)))


CHANGES = {
    "another order of a sum": change_first("down", merge_terms),
    "other leaves": change_first("_dw", halve_leaves, kernel="matmul_dw_f32"),
    "a task that does nothing": change_first("silu", skip),
    "another number of a device": other_numbers,
    "more memory": lambda plan: replace(plan, scratch_bytes=plan.scratch_bytes + 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_a_program_of_another_graph_is_refused(what, tmp_path):
    """Whether or not the checks of a file find a change, this does."""
    changed = CHANGES[what](make("training_dp2tp2"))
    changed.save(tmp_path / "a.plan")
    with pytest.raises(PlanError):
        require_origin(tw.Plan.load(tmp_path / "a.plan"))
    with pytest.raises(
        PlanError, match=r"\[session.require_origin\] a plan must be what planning makes of its graph"
    ):
        require_origin(changed)


def test_what_cannot_be_planned_is_refused():
    """A layout that no strategy gives, a graph with half of its ops, no plan at all."""
    plan = make("training_dp2tp2")
    other = replace(plan.layout, use=plan.layout.use[::-1], home=plan.layout.home[::-1])
    for wrong in (
        replace(plan, layout=other),
        replace(plan, graph=replace(plan.graph, ops=plan.graph.ops[::2])),
        None,
    ):
        with pytest.raises(PlanError, match=r"\[session.require_origin\]"):
            require_origin(wrong)
