"""Exchanges along rows: all-gathers and all-reduces.

In an all-reduce, every device combines its part of a tile's rows from the partial values of all
members of its device group (a reduce-scatter along rows), then copies the parts that its peers (the
other members) have combined.

There are two kinds of all-gathers: the devices have parts of every tile, or each device has its own
run of rows. In the first kind, every device copies the parts of its peers when they have posted the
signal `done`. In the second kind, a task `offer` reads a device's rows and posts `ready` on every
peer, tile by tile. One copy per member waits for `ready` and posts `ack`. An empty task stays a
reader of the rows until all peers have read them, so that nothing overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tilewise.core.mesh import Axes
from tilewise.core.validation import shown
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Ref, Tiles
from tilewise.ir.program import Collective, Mode, Number, NumberLike, Operand, upper
from tilewise.plan.collectives.columns import columns_in_group, expand_reduce_scatter
from tilewise.plan.collectives.handshake import (
    ExchangeLowering,
    Signals,
    emit_gather,
    emit_reduce,
    exchange,
    group_of,
    num_tiles,
    outer_signals,
    pending_of,
    record_reduction,
    residual_of,
    signals,
    tree_kernel,
)

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = [
    "Rows",
    "all_gather_batch",
    "all_gather_rows",
    "all_reduce",
    "all_reduce_in_place",
    "collect_rows",
    "expand_all_gather_batch",
    "expand_all_reduce",
    "expand_reduce_scatter_rows",
]


class Rows(NamedTuple):
    """A member's rows in an all-gather. The fields are the first row, the number of rows and the
    rows per tile.
    """

    first: int
    rows: int
    step: int

    @property
    def tiles(self) -> int:
        """Number of tasks of a loop over these rows."""
        return -(-self.rows // self.step)


def all_gather_rows(low: ExchangeLowering, dst: Ref, done: Signals) -> None:
    """Copy every peer's part of each tile after the peer's signal.

    Args:
        dst: `[rows, cols]`. Member k of the device group has computed part k of the rows of every
            tile, in its own memory.
        done: the signals that each member posts when its part is complete.
    """
    group = done.group
    ack = outer_signals(low, group, done.step, done.tiles)
    own = [Operand(dst.slot, Mode.ROWPART, part=p, parts=group.size) for p in group.peers]
    theirs = [o._replace(group=group.number, member=m) for o, m in zip(own, group.peer_members)]
    gather = emit_gather(low, dst, done.step, dst.dtype, own, theirs)
    done.wait(gather, dst)
    ack.post(gather, dst)
    ack.acknowledge(low, dst)


def collect_rows(low: ExchangeLowering, src: Ref, dst: Ref, axes: Axes, members: Sequence[Rows]) -> None:
    """Copy the rows of all members of a device group, one after another.

    Args:
        src: this device's rows.
        dst: the rows of all members.
        axes: axes of the device group.
        members: the rows of each member.
    """
    group, step = low.numbers.group(axes), upper(src.tile_rows)
    most = max(member.tiles for member in members)
    ready, ack = outer_signals(low, group, step, most), outer_signals(low, group, step, most)
    ready.offer(low, src)
    for number, member in enumerate(members):
        own = Operand(dst.slot, Mode.ROWPART, offset=member.first)
        theirs = Operand(src.slot, Mode.ROW, group=group.number, member=number)
        copy = emit_gather(low, Number(member.rows), member.step, dst.dtype, [own], [theirs])
        ready.wait_for(copy, src, [number])
        ack.post(copy, src, [number])
    ack.acknowledge(low, src)


def all_gather_batch(low: TemplateLowering, source: int, target: int) -> None:
    """Copy the rows of all devices that share a batch of fixed size, in batch order."""
    src, axes = low.tensor(source), low.layout(source)[0]
    rows, step, dst = src.extent.constant, upper(src.tile_rows), low.tensor(target)
    parts = tuple((place * rows, (place + 1) * rows) for place in range(low.mesh.size(*axes)))
    tensors = source, target
    record = Collective("all_gather_batch", low.op.id, axes, src.slot, dst.slot, tensors, step, parts)
    exchange(low, record, expand_all_gather_batch)


def expand_all_gather_batch(low: ExchangeLowering, record: Collective) -> Collective:
    """One copy per member, in the order of the batch."""
    src, dst, step = low.views[record.source], low.views[record.target], upper(record.step)
    members = [Rows(begin, end - begin, step) for begin, end in record.parts]
    collect_rows(low, src, dst, record.axes, members)
    return record


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
    expand: Callable[..., Collective] = expand_all_reduce
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
    exchange(low, record, expand_all_reduce, producer)


def expand_all_reduce(low: ExchangeLowering, record: Collective, producer: Draft | None = None) -> Collective:
    """Combine this device's part of the rows of every tile, from the parts of all members in the
    device group's order. Then gather the parts.

    Args:
        producer: the instruction that writes this device's partial value; None if it is complete
            before the program begins.
    """
    src, dst, step = low.views[record.source], low.views[record.target], record.step
    pending = pending_of(low, record)
    group, tiles = group_of(low, pending), num_tiles(low, src.extent, step)
    ready = signals(low, group, step, tiles) if producer else outer_signals(low, group, step, tiles)
    done = signals(low, group, step, tiles)
    if producer:
        ready.post(producer, src)
    else:
        ready.offer(low, src)

    part = Operand(dst.slot, Mode.ROWPART, part=group.me, parts=group.size)
    views: Tiles = {
        "out": part,
        "x": [part._replace(slot=src.slot, group=group.number, member=m) for m in group.members],
        **residual_of(low, record, part),
    }
    reduce = emit_reduce(low, tree_kernel(pending.combine, src), src, step, dst.dtype, views)
    ready.wait(reduce, src)
    done.post(reduce, dst)
    # in place, `done` of a peer means that it has read the part that the gather overwrites
    if src.slot != dst.slot:
        ack = outer_signals(low, group, step, tiles)
        ack.post(reduce, src)
        ack.acknowledge(low, src)
    all_gather_rows(low, dst, done)
    return record


def expand_reduce_scatter_rows(low: ExchangeLowering, record: Collective) -> Collective:
    """Combine this device's run of rows, from the partial values of all members in the device
    group's order.
    """
    src, dst, step = low.views[record.source], low.views[record.target], upper(record.step)
    pending = pending_of(low, record)
    group, tiles = group_of(low, pending), num_tiles(low, dst.extent, step)
    ready, ack = outer_signals(low, group, step, tiles), outer_signals(low, group, step, tiles)
    parts = [Operand(src.slot, Mode.ROWPART, offset=begin) for begin, _ in record.parts]
    if ready.tiles:
        for member, part in enumerate(parts):
            ready.post(low.hold(dst.extent, step, part, f"{low.op.label}/offer"), src, [member])
    first = group.me._replace(multiple=dst.extent.constant)
    own = Operand(src.slot, Mode.ROWPART, offset=first, group=group.number)
    views: Tiles = {
        "out": Operand(dst.slot, Mode.ROW),
        "x": [own._replace(member=m) for m in group.members],
    }
    reduce = emit_reduce(low, tree_kernel(pending.combine, src), dst, step, dst.dtype, views)
    ready.wait(reduce, src)
    ack.post(reduce, src)
    if ack.tiles:
        for member, part in enumerate(parts):
            ack.wait_for(low.hold(dst.extent, step, part, f"{low.op.label}/ack"), src, [member])
    return record
