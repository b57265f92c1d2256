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
from typing import TYPE_CHECKING, NamedTuple

from tilewise.core.mesh import Axes
from tilewise.ir.lowering import Ref
from tilewise.ir.program import Collective, Mode, Number, Operand, upper
from tilewise.plan.collectives.handshake import Signals, emit_gather, exchange, signals

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = ["Rows", "all_gather_batch", "all_gather_rows", "collect_rows"]


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


def all_gather_rows(low: TemplateLowering, dst: Ref, done: Signals) -> None:
    """Copy every peer's part of each tile after the peer's signal.

    Args:
        dst: `[rows, cols]`. Member k of the device group has computed part k of the rows of every
            tile, in its own memory.
        done: the signals that each member posts when its part is complete.
    """
    group = done.group
    ack = signals(low, group, done.step, done.tiles)
    own = [Operand(dst.slot, Mode.ROWPART, part=p, parts=group.size) for p in group.peers]
    theirs = [o._replace(group=group.number, member=m) for o, m in zip(own, group.peer_members)]
    gather = emit_gather(low, dst, done.step, dst.dtype, own, theirs)
    done.wait(gather, dst)
    ack.post(gather, dst)
    ack.acknowledge(low, dst)


def collect_rows(low: TemplateLowering, src: Ref, dst: Ref, axes: Axes, members: Sequence[Rows]) -> None:
    """Copy the rows of all members of a device group, one after another.

    Args:
        src: this device's rows.
        dst: the rows of all members.
        axes: axes of the device group.
        members: the rows of each member.
    """
    group, step = low.numbers.group(axes), upper(src.tile_rows)
    most = max(member.tiles for member in members)
    ready, ack = signals(low, group, step, most), signals(low, group, step, most)
    offer = low.hold(src.extent, step, Operand(src.slot, Mode.ROW), f"{low.op.label}/offer")
    ready.post(offer, src)
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
    exchange(low, record, _expand_batch)


def _expand_batch(low: TemplateLowering, record: Collective) -> Collective:
    """One copy per member, in the order of the batch."""
    src, dst, step = low.views[record.source], low.views[record.target], upper(record.step)
    members = [Rows(begin, end - begin, step) for begin, end in record.parts]
    collect_rows(low, src, dst, record.axes, members)
    return record
