"""Moves of a tensor from one stage of a pipeline to another, or to all stages.

    sender      a task `offer` reads a tile and posts `ready` on the receivers
    receivers   a copy waits for `ready`, and posts `ack`
    sender      in the call for the next microbatch an empty task waits for `ack`. It counts as a reader of the tile
                that was sent before, so the next writer of this memory waits until the tile has been read. Meanwhile
                the sender computes the next microbatch into other memory. After the last microbatch, a call of its
                own waits.

A receiver reads the whole tensor, once. Devices of both stages that have the same coordinates on all
other axes have the same part of it, so every device reads from one other device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tilewise.core.errors import PlanError
from tilewise.ir.layout import EVERY_STAGE
from tilewise.ir.lowering import Ref, Tiles
from tilewise.ir.program import Collective, Mode, Notify, Operand, Wait
from tilewise.plan.collectives.handshake import Signals, exchange, num_tiles, signals
from tilewise.plan.rings import Sent

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = ["move"]

_COPIED = ("f32", "bf16")


class _Ends(NamedTuple):
    """The stages that move a tensor, and the signals between them.

    Attributes:
        sender, receivers: stages. The sender may be one of the receivers, and then copies.
        ready, ack: the signals, which all calls of a move share.
        before: what the call for the microbatch before has sent.
    """

    sender: int
    receivers: tuple[int, ...]
    ready: Signals
    ack: Signals
    before: Ref

    @property
    def peers(self) -> list[int]:
        """The receivers other than the sender."""
        return [stage for stage in self.receivers if stage != self.sender]


def move(low: TemplateLowering, source: int, target: int) -> None:
    """Copy a tensor between the stages that the op `move` names.

    Raises:
        PlanError: its elements are neither f32 nor bf16.
    """
    stages, op = low.graph_layout.stages, low.op
    assert stages is not None
    if low.spec(source).dtype.name not in _COPIED:
        raise PlanError(
            "[plan.lower] tensors in f32 or bf16 may be passed from one stage to another; got "
            f"{low.spec(source)} of {op.label!r}; convert it, or compute it in the stage that reads it"
        )
    size, to, me = low.mesh.size(stages.axis), op.attrs["target"], low.shapes.stage
    receivers = tuple(range(size)) if to == EVERY_STAGE else (to % size,)
    before, group = low.before(source), low.numbers.group((stages.axis,))
    step, tiles = before.tile_rows, num_tiles(low, before.extent, before.tile_rows)
    ready = signals(low, group, step, tiles, num_posting=1, in_ring=True)
    ack = signals(low, group, step, tiles, in_ring=True)
    ends = _Ends(op.attrs["source"] % size, receivers, ready, ack, before)
    if low.task.is_acknowledgement:
        _acknowledge(low, ends)
        return
    src, dst = low.flat(source), low.flat(target)
    record = Collective(
        "move",
        op.id,
        (stages.axis,),
        src.slot if me == ends.sender else -1,
        dst.slot if me in receivers else -1,
        (source, target),
        step,
    )
    exchange(low, record, lambda low, record: _expand(low, record, src, dst, ends))


def _expand(low: TemplateLowering, record: Collective, src: Ref, dst: Ref, ends: _Ends) -> Collective:
    """Whether this device's stage sends, receives, or both."""
    ready, ack, me, use = ends.ready, ends.ack, low.shapes.stage, Sent().use
    step, group, mode = record.step, ready.group.number, Mode.ROW if ready.per_index else Mode.WHOLE
    if me == ends.sender:
        offer = low.hold(src.extent, step, Operand(src.slot, mode), f"{low.op.label}/offer")
        offer.notifies += [Notify(group, r, ready.first, ready.per_index, src.slot, use) for r in ends.peers]
    if me in ends.receivers:
        theirs = Operand(src.slot, mode)
        if me != ends.sender:
            theirs = theirs._replace(group=group, member=ends.sender)
        copied: Tiles = {"dst": [Operand(dst.slot, mode)], "src": [theirs]}
        copy = low.emit("copy_pairs", over=dst, step=step, dtype=dst.dtype, tiles=copied, priority=2)
        if me != ends.sender:
            copy.waits.append(Wait(ready.first, ready.per_index, 1, group, ends.sender, src.slot, use))
            number = ack.first + me * ack.tiles
            copy.notifies.append(Notify(group, ends.sender, number, ack.per_index, src.slot, use))
    if me == ends.sender:
        _acknowledge(low, ends)
    return record


def _acknowledge(low: TemplateLowering, ends: _Ends) -> None:
    """Keep what was sent in the call before, until all receivers have read it."""
    ack, before, sent = ends.ack, ends.before, Sent()
    operand = Operand(before.slot, Mode.ROW if ack.per_index else Mode.WHOLE)
    task = low.hold(before.extent, ack.step, operand, f"{low.op.label}/ack")
    task.waits += [
        Wait(
            ack.first + r * ack.tiles,
            ack.per_index,
            sent.before,
            ack.group.number,
            r,
            before.slot,
            sent.use_before,
        )
        for r in ends.peers
    ]
