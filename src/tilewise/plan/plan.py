"""The plan: everything decided before running, and the words to explain it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import lcm

from tilewise.core.border import Border
from tilewise.core.errors import LayoutError, PlanError, ResourceError
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.program import Number, NumberLike, times
from tilewise.ir.validate import validate_records
from tilewise.plan.explain import explain_plan, explain_tensor
from tilewise.plan.memory import memory_of_machine
from tilewise.plan.shapes import PlanSettings, check_sizes, symbols_of
from tilewise.plan.tables import PlanTables
from tilewise.plan.traffic import count_traffic

__all__ = ["Plan", "settings_for"]

MAX_WORKERS = 255  # per device, of one task engine (native/tasks/embed/embedded.h)
_MAX_BYTES = 1 << 62
_ROWS_PER_TILE = 512
_ROWS_WITHOUT_BATCH = 128
_border = Border("plan", PlanError)


class Plan(PlanTables):
    """A plan's tables, and what can be asked of them before anything runs."""

    def require_memory(self, limit_bytes: int = 0) -> None:
        """Refuse a plan that cannot be allocated, before anything is.

        Args:
            limit_bytes: over all devices; 0 for what this machine, or the control group of this process, has.

        Raises:
            ResourceError: the devices together need more.
        """
        _border.integer("require_memory", "limit_bytes", limit_bytes, 0, _MAX_BYTES)
        limit = limit_bytes or memory_of_machine()
        need = self.device_bytes * self.mesh.num_devices
        if need > limit:
            raise ResourceError(
                f"[plan.require_memory] the devices' memory must fit {limit} bytes; got {need} for "
                f"{self.mesh.num_devices} devices of {self.device_bytes}; take a smaller batch or model, or accumulate"
            )

    def traffic(self, program: str = "step", sizes: Mapping[str, int] | None = None) -> dict[str, list[int]]:
        """Elements each device reads from others' memory in one run of a program, per label.

        Args:
            program: its name.
            sizes: values of symbolic sizes by name; those that are left out stand at their bounds.

        Raises:
            PlanError: no such program or symbol, or a value out of its bounds.
        """
        _border.choice("traffic", "program", program, list(self.programs))
        values = check_sizes("traffic", self.shapes.symbols, sizes or {})
        return count_traffic(self.program, program, tuple(values.get(s, s.max) for s in self.shapes.symbols))

    def explain(self) -> str:
        """Mesh, memory, tiles, tasks, traffic and templates in words, before anything runs."""
        return explain_plan(self)

    def why(self, name: str) -> str:
        """Why a named tensor has its tile shape and its home.

        Raises:
            PlanError: no such tensor.
        """
        return explain_tensor(self, name)


def settings_for(
    graph: Graph, layout: GraphLayout, batch: BatchCut, workers_per_device: int | None
) -> PlanSettings:
    """Check what a layout says, and choose the row tile.

    Raises:
        PlanError: workers are out of range.
        LayoutError: a value stays partial, or an axis has nothing to share.
    """
    mesh = layout.mesh
    workers = _workers(mesh, workers_per_device)
    validate_records(graph, layout)
    _require_used_axes(graph, layout, mesh)
    if not batch.size:
        return PlanSettings(row_tile=_row_tile_unbatched(graph), workers_per_device=workers)
    axes = _batch_axes(graph, layout)
    rows = _rows_per_sequence(graph, batch)
    per_leaf = batch.size // batch.leaves
    sequences = max(
        k
        for k in range(1, per_leaf + 1)
        if per_leaf % k == 0 and (k == 1 or k * batch.rows <= _ROWS_PER_TILE)
    )
    return PlanSettings(
        batch.microbatches, batch.leaves, batch.size, rows, times(rows, sequences), workers, axes, batch.bound
    )


def _rows_per_sequence(graph: Graph, batch: BatchCut) -> NumberLike:
    length = batch.length
    if length is None:
        return batch.rows
    return Number.of_symbol(symbols_of(graph).index(length), batch.rows // length.max)


def _workers(mesh: DeviceMesh, given: int | None) -> int:
    if given is None:
        return min(MAX_WORKERS, max(1, (os.cpu_count() or 1) // mesh.num_devices))
    return _border.integer("settings", "workers_per_device", given, 1, MAX_WORKERS)


def _require_used_axes(graph: Graph, layout: GraphLayout, mesh: DeviceMesh) -> None:
    """Devices along an axis that shards nothing would all compute the same."""
    used = {axis for tensor in layout.use for axes in tensor for axis in axes}
    for axis in mesh.names:
        if mesh.size(axis) > 1 and axis not in used:
            raise LayoutError(
                f"[plan.settings] every axis of the mesh must have something to share; got {axis}={mesh.size(axis)}, "
                f"which shards no tensor of {graph.name!r}; label the dims it is meant for, or drop the axis"
            )


def _batch_axes(graph: Graph, layout: GraphLayout) -> Axes:
    """How axes and microbatches cut the batch."""
    for t in graph.tensors:
        for label, axes in zip(t.spec.labels, layout.use[t.id]):
            if axes and label is not None and label.is_summed_by_leaves:
                return axes
    return ()


def _row_tile_unbatched(graph: Graph) -> int:
    """Whole sequences for attention over [batch, seq, ...], in layers too; otherwise a fixed number of rows."""
    lengths = {
        length for g in (graph, *(t.graph for t in graph.templates.values())) for length in _sequences(g)
    }
    return lcm(*lengths) if lengths else _ROWS_WITHOUT_BATCH


def _sequences(graph: Graph) -> set[int]:
    """Lengths of the sequences that attention ops see."""
    sizes = [
        graph.spec(op.inputs[0]).shape[1]
        for op in graph.ops
        if op.op == "attention" and op.inputs[0] is not None
    ]
    return {s for s in sizes if isinstance(s, int)}
