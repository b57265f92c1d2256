"""The second half of planning: from a laid-out graph to a plan, a stage per line.

`session.planning` has the first half, from a user's graph to a laid-out graph. Each stage is a
function from frozen values to a frozen value, in a room of its own, and imports no later stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.schedule import MakeSchedules
from tilewise.plan.bind import bind
from tilewise.plan.lower import lower
from tilewise.plan.place import place
from tilewise.plan.prove import prove_calls, prove_plan
from tilewise.plan.schedule import schedule_graph
from tilewise.plan.shapes import PlanSettings
from tilewise.plan.tables import PlanTables
from tilewise.processes.workers import WorkerPool

__all__ = ["make_plan"]

Overhead = Callable[[int, int, int, int], Mapping[str, int]]


def _no_overhead(workers: int, signals: int, handles: int, scratch: int) -> Mapping[str, int]:
    return {}


def make_plan(
    graph: Graph,
    layout: GraphLayout,
    settings: PlanSettings,
    schedule: MakeSchedules,
    optimizer: object = None,
    overhead: Overhead = _no_overhead,
    pool: WorkerPool | None = None,
    definition: str = "",
) -> PlanTables:
    """Order, lower, place and bind a laid-out graph.

    Args:
        schedule: returns the order of a step on each stage, from all segments and the number of microbatches.
        overhead: returns the bytes by category that a device needs besides its arena, from its numbers of workers,
            signals and handles and from the scratch bytes per worker.
        pool: worker processes that lower templates, if there are many.
        definition: the digest of the graph as its author defined it.

    Raises:
        LayoutError: a device would get no part of a tensor, or sizes do not divide as the strategy needs.
        PlanError: the graph has no op.
        InternalError: the plan violates a rule.
    """
    scheduled = schedule_graph(graph, layout, settings, schedule)
    lowered = lower(scheduled, pool)
    placements = place(scheduled, lowered)
    bound = bind(scheduled, lowered, placements)
    needs = lowered.num_signals, bound.num_handles, lowered.scratch_bytes
    plan = PlanTables(
        graph,
        layout,
        settings,
        scheduled.shapes.kinds,
        bound.program,
        bound.outside,
        placements,
        *needs,
        tuple(variant.layout for variant in lowered.variants),
        optimizer,
        overhead(settings.workers_per_device, *needs),
        definition,
    )
    prove_calls(scheduled, lowered, bound.program)
    prove_plan(plan, {v.number: v.values for v in lowered.variants})
    return plan
