"""All-reduce: every device combines its part of a tile's rows, then copies the parts that its peers
(the other members of its device group) have combined.
"""

from __future__ import annotations

from tilewise.core.tree import Interval
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Ref
from tilewise.ir.program import Collective, NumberLike, upper
from tilewise.plan.collectives.all_gather import all_gather_rows
from tilewise.plan.collectives.columns import columns_in_group
from tilewise.plan.collectives.handshake import ClassLowering, group_of, pending_of, record_reduction
from tilewise.plan.collectives.reduce_scatter import reduce_scatter_rows

__all__ = ["all_reduce", "all_reduce_in_place", "expand_all_reduce"]


def all_reduce(
    low: ClassLowering,
    source: int | Ref,
    target: int | Ref,
    residual: int | Ref | None,
    pending: PendingReduction,
    *,
    step: NumberLike | None = None,
    producer: Draft | None = None,
) -> None:
    """Combine `source` over the device group of a pending reduction into `target` (plus a
    residual), tile by tile.

    If the sum is delivered in shards, each device has its columns of it and nothing is gathered
    (`reduce_scatter`).

    Args:
        low: receives the instructions.
        source: `[rows, cols]`, a partial value on every member.
        target: the complete value, or this device's columns of it.
        residual: a tensor that is added after the tree's root: it has the shape of `target`, or one
            row that is added to all rows; or None.
        pending: says the tree, the device group and the layout in which the value is delivered.
        step: rows per task; by default the rows of a tile of `source`.
        producer: the instruction that writes `source`, over the same tiles; by default the
            instruction that was emitted last.
    """
    src, dst = low.tensor(source), low.tensor(target)
    residual_ref = None if residual is None else low.tensor(residual)
    if src.packed:
        src, dst = low.flat(src), low.flat(dst)
        residual_ref = None if residual_ref is None else low.flat(residual_ref)
    step = low.row_step(src) if step is None else step
    tensor = target if isinstance(target, int) else -1
    kind, parts = "all_reduce", list[Interval]()
    if pending.arrives_in_shards:
        kind, group = "reduce_scatter", low.mesh.group(low.shapes.device, *pending.group)
        parts = [columns_in_group(low, tensor, pending.group, device) for device in group]
    record = record_reduction(low, kind, pending, src, dst, tensor, step, residual_ref, parts)
    low.exchange(record, producer or low.instructions[-1])


def all_reduce_in_place(low: ClassLowering, ref: Ref, pending: PendingReduction) -> None:
    """Sum a gradient over a device group in place: every device reduces its own part of the rows
    and copies the parts of its peers.
    """
    flat, producer = low.flat(ref), low.instructions[-1]
    step = upper(producer.step) if ref.packed else 0
    low.exchange(record_reduction(low, "all_reduce", pending, flat, flat, -1, step), producer)


def expand_all_reduce(low: ClassLowering, record: Collective, producer: Draft | None) -> Collective:
    """Reduce-scatter along rows, then all-gather along rows."""
    assert producer is not None
    src, dst = low.views[record.source], low.views[record.target]
    residual = None if record.residual < 0 else low.views[record.residual]
    pending = pending_of(low, record)
    group = group_of(low, pending)
    done = reduce_scatter_rows(low, producer, src, dst, residual, pending.combine, group, record.step)
    all_gather_rows(low, dst, done, group, record.step)
    return record
