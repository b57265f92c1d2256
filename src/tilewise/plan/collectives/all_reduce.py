"""All-reduce: every device combines its part of a tile's rows, then copies the parts that its peers
(the other members of its device group) have combined.
"""

from __future__ import annotations

from tilewise.ir.graph import OpNode
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Ref
from tilewise.ir.program import NumberLike, upper
from tilewise.plan.collectives.all_gather import all_gather_rows
from tilewise.plan.collectives.columns import reduce_scatter_columns
from tilewise.plan.collectives.handshake import ClassLowering, group_of, note_reduction
from tilewise.plan.collectives.reduce_scatter import reduce_scatter_rows

__all__ = ["all_reduce", "all_reduce_in_place"]


def all_reduce(
    low: ClassLowering,
    op: OpNode,
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

    If the sum is delivered in shards, each device combines its columns of the sum, and nothing is
    gathered.

    Args:
        low: receives the instructions.
        op: the op that they belong to.
        source: `[rows, cols]`, a partial value on every member.
        target: the complete value, or this device's columns of it.
        residual: a tensor that is added after the tree's root: it has the shape of `target`, or one
            row that is added to all rows; or None.
        pending: says the tree, the device group and the layout in which the value is delivered.
        step: rows per task; by default the rows of a tile of `source`.
        producer: the instruction that writes `source`, over the same tiles; by default the
            instruction that was emitted last.
    """
    low.completed.add(pending)
    src, dst = low.tensor(source), low.tensor(target)
    residual_ref = None if residual is None else low.tensor(residual)
    if src.packed:
        src, dst = low.flat(src), low.flat(dst)
        residual_ref = None if residual_ref is None else low.flat(residual_ref)
    step = low.row_step(src) if step is None else step
    group = group_of(low, pending)
    note_reduction(low, op, pending, src, dst, residual_ref)
    producer = producer or low.instructions[-1]
    if pending.arrives_in_shards:
        assert isinstance(target, int)
        reduce_scatter_columns(low, op, target, src, dst, residual_ref, pending, producer, step)
        return
    done = reduce_scatter_rows(low, op, producer, src, dst, residual_ref, pending.combine, group, step)
    all_gather_rows(low, op, dst, done, group, step)


def all_reduce_in_place(low: ClassLowering, op: OpNode, ref: Ref, pending: PendingReduction) -> None:
    """Sum a gradient over a device group in place: every device reduces its own part of the rows
    and copies the parts of its peers.
    """
    flat = low.flat(ref)
    producer = low.instructions[-1]
    step = upper(producer.step) if ref.packed else 0
    group = group_of(low, pending)
    note_reduction(low, op, pending, flat, flat)
    done = reduce_scatter_rows(low, op, producer, flat, flat, None, pending.combine, group, step)
    all_gather_rows(low, op, flat, done, group, step)
