"""Turns a user's settings into a plan's settings, after checking the layout, the workers and the
row tile.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from tilewise.core.errors import LayoutError, PlanError
from tilewise.core.limits import num_cores, private_cache_bytes
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.core.validation import Validator
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.policy import DEFAULT_POLICY, ExecutionPolicy
from tilewise.ir.program import Number, NumberLike, times
from tilewise.ir.validate import validate_pending_reductions
from tilewise.plan.policy import require_workers
from tilewise.plan.shapes import LocalShapes, PlanSettings, rows_in_tile, symbols_of

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
    policy: ExecutionPolicy = DEFAULT_POLICY,
) -> PlanSettings:
    """Check a layout and choose the row tile.

    Args:
        rows_per_tile: the maximum number of rows in a tile of activations of a batch, if they are
            whole sequences.
        policy: the execution policy. Its placement `auto` is decided here.

    Raises:
        PlanError: workers or rows are out of range, the policy names workers that there are not, or
            rows are given but the graph has no batch.
        LayoutError: a value stays partial, or an axis shards nothing.
    """
    mesh, stage_axis = layout.mesh, "" if layout.stages is None else layout.stages.axis
    workers = _workers(mesh, workers_per_device)
    validate_pending_reductions(graph, layout)
    _require_used_axes(graph, layout, mesh)
    most_rows = _most_rows(batch, rows_per_tile)
    require_workers(policy, workers)
    if not batch.size:
        settings = PlanSettings(
            row_tile=_row_tile_unbatched(graph),
            workers_per_device=workers,
            is_checkpointed=is_checkpointed,
            storage_axes=layout.storage_axes,
            stage_axis=stage_axis,
        )
        return replace(settings, policy=_decided(policy, graph, layout, settings))
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
    decided = _decided(policy, graph, layout, settings)
    return replace(settings, row_tile=times(settings.seq, sequences), policy=decided)


def _decided(
    policy: ExecutionPolicy, graph: Graph, layout: GraphLayout, settings: PlanSettings
) -> ExecutionPolicy:
    """The policy with a placement instead of `auto`, and without the wish to offload, which `offload`
    answers, so that a saved plan needs no decision of another machine.

    Affinity helps only if a worker's cache still has the parameters that the worker read in the
    last run, so they must fit, and must not be gathered or fetched anew.
    """
    policy = replace(policy, enable_offloading=False)
    if policy.placement != "auto":
        return policy
    shapes = LocalShapes(layout.mesh, settings, graph.k_splits, symbols_of(graph))
    of_stages = [0] * layout.num_stages
    for t in graph.of_kind("parameter"):
        for stage in layout.stages_of(t.id):
            of_stages[stage] += shapes.bytes_max(t.spec, layout.storage[t.id])
    room = settings.workers_per_device * private_cache_bytes()
    stays = not layout.storage_axes and not layout.files and settings.workers_per_device > 1
    placement = "affinity" if stays and max(of_stages) <= room else "owner_computes"
    return replace(policy, placement=placement)


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
