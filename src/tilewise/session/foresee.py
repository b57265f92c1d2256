"""What a plan on one device is going to lower, known as soon as there are gradients (`plan.lower.ahead`)."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.errors import TilewiseError
from tilewise.core.mesh import DeviceMesh
from tilewise.graph.gradients import BackwardTemplate, OnMade, foresee_nothing
from tilewise.ir.batch import cut_batch
from tilewise.ir.graph import Graph, Template
from tilewise.plan import LocalShapes, LoweredAhead, settings_for, symbols_of
from tilewise.strategy import lay_out_alone, lay_out_whole

__all__ = ["lower_ahead"]


def lower_ahead(
    ahead: LoweredAhead,
    graph: Graph,
    mesh: DeviceMesh,
    batch_splits: int | None,
    workers: int | None,
    is_checkpointed: bool,
    rows_per_tile: int | None,
) -> OnMade:
    """Have layers and their gradients lowered with the settings that the plan of a graph will have.

    Args:
        ahead: begins.
        graph: before gradients, without sizes to fix.
        mesh: of one device.
        batch_splits, workers, is_checkpointed, rows_per_tile: as the plan was asked for.

    Returns:
        What begins it, once it is given the gradients.
    """
    try:
        batch = cut_batch(graph, 1, batch_splits)
        layout = lay_out_alone(graph, mesh, lambda graph: None)
        settings = settings_for(graph, layout, batch, workers, is_checkpointed, rows_per_tile)
    except TilewiseError:  # it comes again in its turn, behind what comes before
        return foresee_nothing()
    shapes = LocalShapes(mesh, settings, graph.k_splits, symbols_of(graph), kinds=(0,))
    layouts = {op.attrs["template"]: layout.calls[op.id] for op in graph.ops if op.op == "call"}

    def begin(made: Sequence[tuple[Template, BackwardTemplate]]) -> None:
        forward = [(template, b.saved, layouts[template.key]) for template, b in reversed(made)]
        backward = [(b.template, (), lay_out_whole(b.template, mesh)) for _, b in made]
        ahead.begin([*forward, *backward], shapes)  # in the order of a step: `made` has the last layers first

    return begin
