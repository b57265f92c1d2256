"""The prove stage: checks every plan, before it is returned, against the rules of `ir.validate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.ir.program import TileProgram
from tilewise.ir.validate import (
    Values,
    Work,
    validate_acknowledgements,
    validate_bindings,
    validate_values,
)
from tilewise.plan.bind import phases_of_programs
from tilewise.plan.lower import Use, Variants
from tilewise.plan.rings import RING_DEPTH, place_of_use
from tilewise.plan.schedule import Scheduled
from tilewise.plan.tables import PlanTables

__all__ = ["prove_calls", "prove_plan"]


def prove_plan(plan: PlanTables, values: Mapping[int, Sequence[Values]] | None = None) -> None:
    """Check that each pending reduction is completed once, and each value is complete when it is
    read. Inputs and persistent state count as written before the run.

    Args:
        plan: all stages before have made it.
        values: what templates read and write, by number and class, for those that were checked when
            they were lowered.

    Raises:
        InternalError: names the op or instruction that violates a rule.
    """
    validate_acknowledgements(plan.program)
    kinds = {t.id: t.kind for t in plan.graph.tensors}
    written = frozenset(e for t, entries in plan.outside.items() if kinds[t] != "result" for e in entries)
    validate_values(plan.program, plan.layouts, written, {"backward": ("forward",)}, values)


def prove_calls(scheduled: Scheduled, lowered: Variants, program: TileProgram) -> None:
    """Check that each call works on the tensors that its op names.

    Raises:
        InternalError: names the call and the tensor.
    """
    work = [_work_of_stage(scheduled, lowered, stage) for stage in range(len(lowered.uses))]
    of_classes = [work[scheduled.stage_of_class(c)] for c in range(len(program.classes))]
    validate_bindings(program, scheduled.graph, of_classes, scheduled.tensors.roots, scheduled.tensors.part)


def _work_of_stage(scheduled: Scheduled, lowered: Variants, stage: int) -> dict[str, tuple[Work, ...]]:
    """What each call of each list of a stage does."""
    bound = [(use, _work_of(scheduled, lowered, use)) for use in lowered.uses[stage]]
    work = {
        name: tuple(of for use, of in bound if use.segment.phase in phases)
        for name, phases in phases_of_programs(scheduled).items()
    }
    return {**work, "broadcast": (Work("broadcast"),)}


def _work_of(scheduled: Scheduled, lowered: Variants, use: Use) -> Work:
    segment, rings = use.segment, lowered.variants[use.variant].rings
    places = tuple(place_of_use(use.ring_use, age) for age in range(RING_DEPTH))
    return Work(segment.name(scheduled.graph), segment.call, use.microbatch, rings, places)
