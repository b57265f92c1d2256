"""Turns a user's settings into a plan's settings, after checking the layout, the workers and the
row tile.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from tilewise.core.errors import LayoutError, PlanError
from tilewise.core.limits import num_cores
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.core.validation import Validator
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.program import Number, NumberLike, times
from tilewise.ir.validate import validate_pending_reductions
from tilewise.plan.shapes import PlanSettings, rows_in_tile, symbols_of

__all__ = ["MAX_ROWS_PER_TILE", "settings_for"]

_MAX_WORKERS = 255  # per device, of one task engine (native/tasks/embed/embedded.h)
MAX_ROWS_PER_TILE = 1 << 24
_ROWS_PER_TILE = 512
_ROWS_WITHOUT_BATCH = 128
_validate = Validator("plan", PlanError)


def settings_for(
    graph: Graph,
    layout: GraphLayout,
    batch: BatchCut,
    workers_per_device: int | None,
    is_checkpointed: bool = False,
    rows_per_tile: int | None = None,
) -> PlanSettings:
    """Check a layout and choose the row tile.

    Args:
        rows_per_tile: the maximum number of rows in a tile of activations of a batch, if they are
            whole sequences.

    Raises:
        PlanError: workers or rows are out of range, or rows are given but the graph has no batch.
        LayoutError: a value stays partial, or an axis shards nothing.
    """
    mesh, stage_axis = layout.mesh, "" if layout.stages is None else layout.stages.axis
    workers = _workers(mesh, workers_per_device)
    validate_pending_reductions(graph, layout)
    _require_used_axes(graph, layout, mesh)
    most_rows = _most_rows(batch, rows_per_tile)
    if not batch.size:
        return PlanSettings(
            row_tile=_row_tile_unbatched(graph),
            workers_per_device=workers,
            is_checkpointed=is_checkpointed,
            storage_axes=layout.storage_axes,
            stage_axis=stage_axis,
        )
    settings = PlanSettings(
        accumulation=batch.microbatches,
        batch_splits=batch.batch_splits,
        batch=batch.size,
        seq=_rows_per_sequence(graph, batch),
        most_rows=most_rows,
        workers_per_device=workers,
        batch_axes=_batch_axes(graph, layout),
        padded_bound=batch.bound,
        is_checkpointed=is_checkpointed,
        storage_axes=layout.storage_axes,
        stage_axis=stage_axis,
    )
    sequences = rows_in_tile(batch.rows, settings) // batch.rows
    return replace(settings, row_tile=times(settings.seq, sequences))


def _rows_per_sequence(graph: Graph, batch: BatchCut) -> NumberLike:
    length = batch.length
    if length is None:
        return batch.rows
    return Number.of_symbol(symbols_of(graph).index(length), batch.rows // length.max)


def _workers(mesh: DeviceMesh, workers: int | None) -> int:
    if workers is None:
        return min(_MAX_WORKERS, max(1, num_cores() // mesh.num_devices))
    return _validate.integer("settings", "workers_per_device", workers, 1, _MAX_WORKERS)


def _most_rows(batch: BatchCut, rows: int | None) -> int:
    if rows is None:
        return _ROWS_PER_TILE
    if not batch.size:
        _validate.invalid(
            "settings", "rows_per_tile needs a graph with a batch", "a graph without a batch", "leave it out"
        )
    return _validate.integer("settings", "rows_per_tile", rows, 1, MAX_ROWS_PER_TILE)


def _require_used_axes(graph: Graph, layout: GraphLayout, mesh: DeviceMesh) -> None:
    """Devices along an axis that shards nothing would all compute the same."""
    used = {axis for tensor in {*layout.compute} for axes in tensor for axis in axes}
    used |= set() if layout.stages is None else {layout.stages.axis}
    for axis in mesh.names:
        if mesh.size(axis) > 1 and axis not in used:
            raise LayoutError(
                f"[plan.settings] every axis of the mesh must have something to share; got {axis}={mesh.size(axis)}, "
                f"which shards no tensor of {graph.name!r}; label the dims it is meant for, or drop the axis"
            )


def _batch_axes(graph: Graph, layout: GraphLayout) -> Axes:
    """How axes and microbatches divide the batch."""
    for t, use in zip(graph.tensors, layout.compute):
        for label, axes in zip(t.spec.labels, use) if any(use) else ():
            if axes and label is not None and label.is_summed_by_batch_splits:
                return axes
    return ()


def _row_tile_unbatched(graph: Graph) -> int:
    """Whole sequences for attention over [batch, seq, ...], in layers too; otherwise a fixed number
    of rows.
    """
    lengths = {
        length for g in (graph, *(t.graph for t in graph.templates.values())) for length in _sequences(g)
    }
    return lcm(*lengths) if lengths else _ROWS_WITHOUT_BATCH


def _sequences(graph: Graph) -> set[int]:
    """Lengths of the sequences of attention ops."""
    sizes = [
        graph.spec(op.inputs[0]).shape[1]
        for op in graph.ops
        if op.op == "attention" and op.inputs[0] is not None
    ]
    return {s for s in sizes if isinstance(s, int)}
