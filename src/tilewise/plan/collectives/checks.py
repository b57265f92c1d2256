"""Checks of exchanges: one function per kind of record, before its instructions are used.

They find exchanges over other devices than the layout says, of parts that are missing, doubled or
out of order, and of a value that must be delivered otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn

from tilewise.core.errors import InternalError
from tilewise.core.mesh import Axes
from tilewise.ir.graph import PANEL_ROWS
from tilewise.ir.layout import BATCH_SPLITS, EVERY_STAGE, GraphLayout, TensorLayout, show_axes, show_layout
from tilewise.ir.lowering import Ref
from tilewise.ir.program import COPIES, Collective, Slot
from tilewise.plan.shapes import round_up

__all__ = ["CHECKS", "check_collective"]


class _Checked(NamedTuple):
    """A record, the layout of the graph that its template lowers, and what the template's slots are."""

    record: Collective
    layout: GraphLayout
    slots: Sequence[Slot]
    views: Sequence[Ref]

    def layouts(self) -> tuple[TensorLayout, TensorLayout]:
        """The layouts of the tensors before and after a copy."""
        before, after = self.record.tensors
        return self.layout.compute[before], self.layout.compute[after]

    def invalid(self, rule: str, got: str) -> NoReturn:
        """Raise an error that names the record."""
        raise InternalError(
            f"[plan.collectives] {self.record.kind} of op {self.record.op} {rule}; got {got}; please report the plan"
        )

    def require_adjacent(self, size: int, axes: Axes | None = None) -> None:
        """The members' parts are adjacent, from the first to the last of `size`. Members that hold
        one KV head have the same part. `axes` are those that divide; by default the device group's.
        """
        parts = self.record.parts
        members = self.layout.mesh.size(*(self.record.axes if axes is None else axes))
        joined = len(parts) == members and all(
            after[0] == before[1] or after == before for before, after in pairwise(parts)
        )
        if not joined or (parts[0][0], parts[-1][1]) != (0, size):
            self.invalid(f"must join the parts of all members to {size} rows or columns", f"{list(parts)}")


def check_collective(
    record: Collective, layout: GraphLayout, slots: Sequence[Slot], views: Sequence[Ref]
) -> None:
    """Check a record of a template.

    Args:
        layout: of the graph that the template lowers.
        slots, views: what the template's slots refer to, and their views in a class of devices.

    Raises:
        InternalError: names the record, and what the layout asks for.
    """
    checked = _Checked(record, layout, slots, views)
    if record.kind not in COPIES or (record.kind == "tile_program" and record.partial):
        _check_pending(checked)
    elif record.partial:
        checked.invalid("must not complete a value", f"{record.partial!r}")
    CHECKS[record.kind](checked)


def _check_pending(checked: _Checked) -> None:
    """It completes a pending reduction over the devices of that, and delivers it as that asks for."""
    record = checked.record
    pending_reductions = checked.layout.pending_reductions.get((record.op, record.partial), ())
    if not 0 <= record.number < len(pending_reductions):
        checked.invalid("must complete a pending reduction", f"none of {record.partial!r}")
    pending = pending_reductions[record.number]
    if record.axes != pending.group:
        checked.invalid(f"must be over {show_axes(pending.group)}", show_axes(record.axes))
    if record.kind == "tile_program":
        if pending.arrives_in_shards or pending.tree == BATCH_SPLITS:
            checked.invalid(
                "must deliver the whole value, and not a sum over the batch", f"{pending.partial!r}"
            )
        return
    is_per_microbatch = pending.is_completed_per_microbatch
    kind = "add_microbatch" if is_per_microbatch else "all_reduce"
    if pending.arrives_in_shards:
        by_rows = any(len(layout) > 1 and set(layout[0]) & set(pending.group) for layout in pending.arrives)
        kind = "reduce_scatter_rows" if by_rows else "reduce_scatter"
        kind = "reduce_to_shards" if pending.tree == BATCH_SPLITS else kind
    if record.kind != kind:
        checked.invalid("must deliver the value as its layout says", f"a reduction that needs {kind}")
    if (record.stack >= 0, record.microbatch >= 0) != (is_per_microbatch, is_per_microbatch):
        checked.invalid("must have a stack if devices share microbatches", f"slot {record.stack}")


def _check_rows_of_tiles(checked: _Checked) -> None:
    """Members divide the rows of every tile equally; source and result have one form."""
    record, views = checked.record, checked.views
    source, target = views[record.source], views[record.target]
    if record.parts or (source.extent, source.cols) != (target.extent, target.cols):
        checked.invalid("must have a result of the parts' size", f"{source} and {target}")


def _check_reduce_scatter(checked: _Checked) -> None:
    checked.require_adjacent(checked.views[checked.record.source].cols)


def _check_reduce_scatter_rows(checked: _Checked) -> None:
    """Members have equal runs of rows."""
    source, target = (checked.views[slot] for slot in (checked.record.source, checked.record.target))
    checked.require_adjacent(source.extent.constant)
    if {end - begin for begin, end in checked.record.parts} != {target.extent.constant}:
        checked.invalid("must give all members as many rows", f"{list(checked.record.parts)}")


def _check_all_to_all(checked: _Checked) -> None:
    """Its axes divide the rows of both tensors. Members read rows that exist, and write each of their
    rows at most once.
    """
    record = checked.record
    if {layout[0] for layout in checked.layouts()} != {record.axes}:
        checked.invalid("must be over the axes that divide the rows of both tensors", show_axes(record.axes))
    if record.tensors != tuple(checked.slots[slot].id for slot in (record.source, record.target)):
        checked.invalid("must copy the tensors of its slots", str(record.tensors))
    rows = [checked.views[slot].extent.constant for slot in (record.source, record.target)]
    members = checked.layout.mesh.size(*record.axes)
    moves = [*zip(record.parts[::2], record.parts[1::2])]
    if len(record.parts) != 2 * members**2:
        checked.invalid(
            f"must have two runs of rows for each of {members} x {members} pairs", str(len(moves))
        )
    for to in range(members):
        written = sorted((m for m in moves[to::members] if m[1][0] < m[1][1]), key=lambda move: move[1])
        ends = [0, *(target[1] for _, target in written)]
        for (source, target), free in zip(written, ends):
            is_inside = 0 <= source[0] <= source[1] <= rows[0] and free <= target[0] <= target[1] <= rows[1]
            if not is_inside or source[1] - source[0] != target[1] - target[0]:
                checked.invalid(
                    "must copy rows that exist to rows that nothing else is copied to",
                    f"{source} to {target}",
                )


def _check_reduce_to_shards(checked: _Checked) -> None:
    """In hybrid sharding, several members have the same storage shard."""
    record = checked.record
    pending = checked.layout.pending_reductions[record.op, record.partial][record.number]
    delivered = {axis for layout in pending.arrives for axes in layout for axis in axes}
    rows = checked.views[record.source].extent.constant
    cut = tuple(axis for axis in record.axes if axis in delivered)
    checked.require_adjacent(round_up(rows, PANEL_ROWS), cut)


def _require_axes_of(checked: _Checked, dim: int) -> None:
    """Its axes are those that only the source's dim (the first or the last) has; other dims are equal."""
    record = checked.record
    source, target = checked.layouts()
    others = slice(1, None) if dim == 0 else slice(-1)
    if source[others] != target[others] or source[dim] != (*target[dim], *record.axes):
        checked.invalid(
            f"must be over the axes from {show_layout(source)} to {show_layout(target)}",
            show_axes(record.axes),
        )


def _check_last_dim(checked: _Checked) -> None:
    """All columns are copied."""
    record = checked.record
    _require_axes_of(checked, -1)
    whole = record.parts[-1][1] if record.target < 0 else checked.views[record.target].cols
    checked.require_adjacent(whole)


def _check_first_dim(checked: _Checked) -> None:
    """All rows are copied."""
    record = checked.record
    _require_axes_of(checked, 0)
    is_weight = record.kind == "all_gather_parameters"
    if (checked.slots[record.source].kind == "flat") != is_weight:  # weights are copied as plain rows
        checked.invalid("must copy weights, or rows of a batch", checked.slots[record.source].kind)
    rows = checked.views[record.target].extent.constant
    checked.require_adjacent(round_up(rows, PANEL_ROWS) if is_weight else rows)


def _check_move(checked: _Checked) -> None:
    """Whether the move copies a whole part, to a stage where it has the same layout."""
    record, (before, after) = checked.record, checked.layouts()
    stages = checked.layout.stages
    if stages is None or record.axes != (stages.axis,) or before != after:
        checked.invalid("must be along the axis of stages, and keep the layout", show_axes(record.axes))
    if record.source < 0 and record.target < 0:
        checked.invalid("must be lowered for the stages that send or receive", "another stage")
    to, size = stages.ops[record.op], checked.layout.num_stages
    receivers = tuple(range(size)) if to == EVERY_STAGE else (to % size,)
    if stages.tensors[record.tensors[1]] != receivers:
        checked.invalid("must copy to the stages of its op", f"tensor {record.tensors[1]}")


def _check_program(checked: _Checked) -> None:
    """Its devices are on axes of the mesh, and it uses slots of the template."""
    record = checked.record
    if not {*record.axes} <= {*checked.layout.mesh.names} or not record.uses:
        checked.invalid("must be over axes of the mesh, and use tensors", show_axes(record.axes))


CHECKS: Mapping[str, Callable[[_Checked], None]] = {
    "all_reduce": _check_rows_of_tiles,
    "add_microbatch": _check_rows_of_tiles,
    "reduce_scatter": _check_reduce_scatter,
    "reduce_scatter_rows": _check_reduce_scatter_rows,
    "all_to_all": _check_all_to_all,
    "reduce_to_shards": _check_reduce_to_shards,
    "all_gather_columns": _check_last_dim,
    "gather": _check_last_dim,
    "move": _check_move,
    "tile_program": _check_program,
    "all_gather_batch": _check_first_dim,
    "all_gather_parameters": _check_first_dim,
}
