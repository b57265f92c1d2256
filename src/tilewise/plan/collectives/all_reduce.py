"""All-reduce: every device combines its part of a tile's rows from the partial values of all
members of its device group (a reduce-scatter along rows), then copies the parts that its peers (the
other members) have combined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.core.validation import shown
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Ref, Tiles
from tilewise.ir.program import Collective, Mode, NumberLike, Operand, upper
from tilewise.plan.collectives.all_gather import all_gather_rows
from tilewise.plan.collectives.columns import columns_in_group, expand_reduce_scatter
from tilewise.plan.collectives.handshake import (
    TREES,
    emit_reduce,
    exchange,
    group_of,
    num_tiles,
    pending_of,
    record_reduction,
    residual_of,
    signals,
)

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = ["all_reduce", "all_reduce_in_place"]


def all_reduce(
    low: TemplateLowering,
    source: int | Ref,
    target: int | Ref,
    residual: int | Ref | None,
    pending: PendingReduction,
    *,
    step: NumberLike | None = None,
    producer: Draft | None = None,
) -> None:
    """Combine `source` over the device group of a pending reduction into `target` (plus a
    residual), tile by tile (see `ir.lowering.Lowering.all_reduce`).

    If the sum is delivered in shards, each device has its columns of it and nothing is gathered
    (`reduce_scatter`).
    """
    if not isinstance(pending, PendingReduction):
        low.invalid(
            "all_reduce needs a result of low.pending_reduction, which returns None for a value that is not shared",
            shown(pending),
        )
    src, dst = low.tensor(source), low.tensor(target)
    added = None if residual is None else low.tensor(residual)
    if src.packed:
        src, dst = low.flat(src), low.flat(dst)
        added = None if added is None else low.flat(added)
    step = low.row_step(src) if step is None else step
    tensor = target if isinstance(target, int) else -1
    record = record_reduction(low, "all_reduce", pending, src, dst, tensor, step)
    if added is not None:
        record = record._replace(residual=added.slot)
    expand = _expand_all_reduce
    if pending.arrives_in_shards:
        devices = low.mesh.group(low.shapes.device, *pending.group)
        parts = tuple(columns_in_group(low, tensor, pending.group, device) for device in devices)
        record, expand = record._replace(kind="reduce_scatter", parts=parts), expand_reduce_scatter
    exchange(low, record, expand, producer or low.instructions[-1])


def all_reduce_in_place(low: TemplateLowering, ref: Ref, pending: PendingReduction) -> None:
    """Sum a gradient over a device group in place: every device reduces its own part of the rows
    and copies the parts of its peers.
    """
    flat, producer = low.flat(ref), low.instructions[-1]
    step = upper(producer.step) if ref.packed else 0
    record = record_reduction(low, "all_reduce", pending, flat, flat, -1, step)
    exchange(low, record, _expand_all_reduce, producer)


def _expand_all_reduce(low: TemplateLowering, record: Collective, producer: Draft) -> Collective:
    """Combine this device's part of the rows of every tile, from the parts of all members in the
    device group's order. Then gather the parts.
    """
    src, dst, step = low.views[record.source], low.views[record.target], record.step
    pending = pending_of(low, record)
    group, tiles = group_of(low, pending), num_tiles(low, src.extent, step)
    ready, done = signals(low, group, step, tiles), signals(low, group, step, tiles)
    ready.post(producer, src)

    part = Operand(dst.slot, Mode.ROWPART, part=group.me, parts=group.size)
    views: Tiles = {
        "out": part,
        "x": [part._replace(slot=src.slot, group=group.number, member=m) for m in group.members],
        **residual_of(low, record, part),
    }
    reduce = emit_reduce(low, TREES[pending.combine], src, step, dst.dtype, views)
    ready.wait(reduce, src)
    done.post(reduce, dst)
    # in place, `done` of a peer means that it has read the part that the gather overwrites
    if src.slot != dst.slot:
        ack = signals(low, group, step, tiles)
        ack.post(reduce, src)
        ack.acknowledge(low, src)
    all_gather_rows(low, dst, done)
    return record
