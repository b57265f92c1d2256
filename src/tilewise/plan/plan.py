"""The plan: everything decided before running, and the words to explain it."""

from __future__ import annotations

import os
from math import lcm, prod

from tilewise.core.border import Border
from tilewise.core.dims import is_power_of_two
from tilewise.core.errors import LayoutError, PlanError, ResourceError
from tilewise.core.mesh import DeviceMesh
from tilewise.ir.graph import Graph, TensorNode
from tilewise.ir.layout import GraphLayout
from tilewise.ir.verify_layout import verify_layout, verify_microbatches
from tilewise.plan.explain import explain_plan, explain_tensor
from tilewise.plan.memory import memory_of_machine
from tilewise.plan.shapes import PlanSettings
from tilewise.plan.tables import PlanTables
from tilewise.plan.traffic import count_traffic

__all__ = ["Plan", "settings_for"]

MAX_WORKERS = 255  # per device, of one task engine (native/tasks/embed/embedded.h)
MAX_PARTS = 1 << 20
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

    def traffic(self, program: str = "step") -> dict[str, list[int]]:
        """Elements each device reads from others' memory in one run of a program, per label."""
        _border.choice("traffic", "program", program, list(self.programs))
        return count_traffic(self.programs[program], self.symbol_bounds)

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
    graph: Graph,
    layout: GraphLayout,
    mesh: DeviceMesh,
    accumulation: int,
    leaves: int | None,
    workers_per_device: int | None,
) -> PlanSettings:
    """Check the batch against devices, accumulation and leaves, and choose the row tile.

    Raises:
        PlanError: accumulation, leaves or workers are out of range, or do not fit.
        LayoutError: the batch does not divide, or an axis has nothing to share.
    """
    workers = _workers(mesh, workers_per_device)
    accumulation = _border.integer("settings", "accumulation", accumulation, 1, MAX_PARTS)
    if not is_power_of_two(accumulation):
        _border.refuse(
            "settings", "accumulation must be a power of two", str(accumulation), "choose 1, 2, 4, …"
        )
    verify_layout(graph, layout)
    _require_used_axes(graph, layout, mesh)
    found = _batch_and_rows(graph)
    if found is None:
        if accumulation > 1:
            raise LayoutError(
                f"[plan.settings] accumulation needs inputs labelled 'batch'; got none in {graph.name!r}; label dim 0 "
                "of its inputs"
            )
        return PlanSettings(row_tile=_row_tile_unbatched(graph), workers_per_device=workers)
    if accumulation > 1:
        verify_microbatches(graph)
    batch, seq = found
    axis = _batch_axis(graph, layout)
    share = accumulation * mesh.size(axis)
    leaves = min(16, batch & -batch) if leaves is None else leaves
    leaves = _border.integer("settings", "leaves", leaves, 1, MAX_PARTS)
    if not is_power_of_two(leaves) or batch % leaves:
        _border.refuse(
            "settings",
            "leaves must be a power of two that divides the batch",
            f"{leaves} for {batch}",
            "correct it",
        )
    if leaves % share:
        raise LayoutError(
            f"[plan.settings] the batch's {leaves} leaves must divide by {axis or 'devices'} x accumulation; got "
            f"{mesh.size(axis)} x {accumulation}; use a batch or leaves that are a multiple of {share}"
        )
    per_leaf = batch // leaves
    sequences = max(
        k for k in range(1, per_leaf + 1) if per_leaf % k == 0 and (k == 1 or k * seq <= _ROWS_PER_TILE)
    )
    return PlanSettings(accumulation, leaves, batch, seq, sequences * seq, workers, axis)


def _workers(mesh: DeviceMesh, given: int | None) -> int:
    if given is None:
        return min(MAX_WORKERS, max(1, (os.cpu_count() or 1) // mesh.num_devices))
    return _border.integer("settings", "workers_per_device", given, 1, MAX_WORKERS)


def _require_used_axes(graph: Graph, layout: GraphLayout, mesh: DeviceMesh) -> None:
    """Devices along an axis that shards nothing would all compute the same."""
    used = {axis for t in graph.tensors for axis in layout.tensors[t.id] if axis}
    for axis in mesh.names:
        if mesh.size(axis) > 1 and axis not in used:
            raise LayoutError(
                f"[plan.settings] every axis of the mesh must have something to share; got {axis}={mesh.size(axis)}, "
                f"which shards no tensor of {graph.name!r}; label the dims it is meant for, or drop the axis"
            )


def _batched(graph: Graph) -> list[TensorNode]:
    """What comes from outside and has a part for every sequence of the step."""
    nodes = (*graph.of_kind("input"), *graph.of_kind("constant"))
    return [t for t in nodes if (label := t.spec.labels[0]) is not None and label.is_batch]


def _batch_axis(graph: Graph, layout: GraphLayout) -> str:
    """The axis that shards the batch; empty when none does. One strategy maps a label to one axis."""
    return next((axis for t in _batched(graph) if (axis := layout.tensors[t.id][0])), "")


def _batch_and_rows(graph: Graph) -> tuple[int, int] | None:
    """Size of the batch, and rows per element of it, which all batched inputs share; None without any."""
    found = {}
    for t in _batched(graph):
        lead = len(t.spec.shape) - (t.spec.storage == "rows" and len(t.spec.shape) > 1)
        sizes = t.spec.shape[:lead]
        if not all(isinstance(s, int) for s in sizes):
            _border.refuse(
                "settings", "the batch has a fixed size", f"{t.spec} {t.spec.name!r}", "fix its dims"
            )
        found[t.spec.name] = (sizes[0], prod(s for s in sizes[1:] if isinstance(s, int)))
    if len(set(found.values())) > 1:
        words = ", ".join(f"{name} {batch} x {rows}" for name, (batch, rows) in found.items())
        raise PlanError(
            f"[plan.settings] batched inputs must have one batch and one number of rows per element; got {words}; "
            "give them the same leading dims"
        )
    batch, rows = next(iter(found.values()), (0, 0))
    return (batch, rows) if isinstance(batch, int) and batch else None


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
