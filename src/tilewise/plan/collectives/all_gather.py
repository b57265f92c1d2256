"""All-gathers along rows. There are two kinds: the devices have parts of every tile, or each device
has its own run of rows.

In the first kind, every device copies the parts of its peers (the other members of its device
group) when they have posted the signal `done`. In the second kind, a task `offer` reads a device's
rows and posts `ready` on every peer, tile by tile. One copy per member waits for `ready` and posts
`ack`. An empty task stays a reader of the rows until all peers have read them, so that nothing
overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise.core.mesh import Axes
from tilewise.ir.lowering import Draft, Ref, Tiles
from tilewise.ir.program import Collective, Mode, Notify, Number, NumberLike, Operand, Wait, is_single, upper
from tilewise.plan.classes import DeviceGroup
from tilewise.plan.collectives.handshake import (
    ClassLowering,
    acknowledge,
    await_peers,
    gather_label,
    num_tiles,
    post_to_peers,
)

__all__ = ["Rows", "all_gather_batch", "all_gather_rows", "collect_rows", "expand_all_gather_batch"]


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


def all_gather_rows(low: ClassLowering, dst: Ref, done: int, group: DeviceGroup, step: NumberLike) -> None:
    """Copy every peer's part of each tile after the peer's signal.

    Args:
        low: receives the instructions.
        dst: `[rows, cols]`. Member k of the device group has computed part k of the rows of every
            tile, in its own memory.
        done: the signal range in which each member posts that its part is complete.
        group: the members.
        step: rows per task; 0 for one task over all rows.
    """
    tiles, per_index = num_tiles(low, dst.extent, step), not is_single(step)
    ack = low.signals(group.size * tiles)
    own = [Operand(dst.slot, Mode.ROWPART, part=p, parts=group.size) for p in group.peers]
    views: Tiles = {
        "dst": own,
        "src": [o._replace(group=group.number, member=m) for o, m in zip(own, group.peer_members)],
    }
    label = gather_label(low.op.label)
    gather = low.emit(
        "copy_pairs", over=dst, step=step, dtype=dst.dtype, tiles=views, priority=2, label=label
    )
    await_peers(gather, group, done, tiles, dst, per_index=per_index)
    post_to_peers(gather, group, ack, tiles, dst, per_index=per_index)
    acknowledge(low, dst, group, ack, tiles, step)


def collect_rows(low: ClassLowering, src: Ref, dst: Ref, axes: Axes, members: Sequence[Rows]) -> None:
    """Copy the rows of all members of a device group, one after another.

    Args:
        low: receives the instructions.
        src: this device's rows.
        dst: the rows of all members.
        axes: axes of the device group.
        members: the rows of each member.
    """
    group, most = low.numbers.group(axes), max(member.tiles for member in members)
    ready, ack = low.signals(group.size * most), low.signals(group.size * most)
    step = upper(src.tile_rows)
    offer = low.hold(src.extent, step, Operand(src.slot, Mode.ROW), f"{low.op.label}/offer")
    post_to_peers(offer, group, ready, most, src, per_index=True)
    read = Number(ack, most * group.me.multiple, group.me.source, group.me.which)
    for number, member in enumerate(members):
        views: Tiles = {
            "dst": [Operand(dst.slot, Mode.ROWPART, offset=member.first)],
            "src": [Operand(src.slot, Mode.ROW, group=group.number, member=number)],
        }
        copy = low.emit(
            "copy_pairs",
            over=Number(member.rows),
            step=member.step,
            dtype=dst.dtype,
            tiles=views,
            priority=2,
            label=gather_label(low.op.label),
        )
        copy.waits.append(Wait(ready + number * most, True, 1, group.number, number, src.slot))
        copy.notifies.append(Notify(group.number, number, read, True, src.slot))
    acknowledge(low, src, group, ack, most, step)


def all_gather_batch(low: ClassLowering, source: int, target: int) -> None:
    """Copy the rows of all devices that share a batch of fixed size, in batch order."""
    src, axes = low.tensor(source), low.layout(source)[0]
    rows, step, dst = src.extent.constant, upper(src.tile_rows), low.tensor(target)
    parts = tuple((place * rows, (place + 1) * rows) for place in range(low.mesh.size(*axes)))
    low.exchange(
        Collective("all_gather_batch", low.op.id, axes, src.slot, dst.slot, (source, target), step, parts)
    )


def expand_all_gather_batch(low: ClassLowering, record: Collective, producer: Draft | None) -> Collective:
    """One copy per member, in the order of the batch."""
    src, dst, step = low.views[record.source], low.views[record.target], upper(record.step)
    members = [Rows(begin, end - begin, step) for begin, end in record.parts]
    collect_rows(low, src, dst, record.axes, members)
    return record
