"""Moves of a tensor from one stage of a pipeline to another, or to all stages.

    sender      a task `offer` reads a tile and posts `ready` on the receivers
    receivers   a copy waits for `ready`, and posts `ack`
    sender      in the call for the next microbatch an empty task waits for `ack`. It counts as a reader of the tile
                that was sent before, so the next writer of this memory waits until the tile has been read. Meanwhile
                the sender computes the next microbatch into other memory. The last call of a step also waits for its
                own tiles.

A receiver reads the whole tensor, once. Devices of both stages that have the same coordinates on all
other axes have the same part of it, so every device reads from one other device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tilewise.core.errors import PlanError
from tilewise.ir.layout import EVERY_STAGE
from tilewise.ir.lowering import Ref, Tiles
from tilewise.ir.program import Collective, Mode, Notify, Number, Operand, Slot, Wait, is_single
from tilewise.plan.collectives.handshake import exchange, num_tiles, signals
from tilewise.plan.rings import Sent

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = ["move"]

_COPIED = ("f32", "bf16")


class _Ends(NamedTuple):
    """Who moves what.

    Attributes:
        source, target: the tensor on the sender and on the receivers.
        before: the tensor that the call for the microbatch before has sent.
        sender, receivers: stages. The sender may be one of the receivers, and then copies.
    """

    source: Ref
    target: Ref
    before: Ref
    sender: int
    receivers: tuple[int, ...]


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
    size = low.mesh.size(stages.axis)
    to = op.attrs["target"]
    src, dst = low.flat(source), low.flat(target)
    before = low.slot(Slot("flat", low.keys[src.slot].id, 1), lambda slot: src._replace(slot=slot))
    receivers = tuple(range(size)) if to == EVERY_STAGE else (to % size,)
    ends = _Ends(src, dst, before, op.attrs["source"] % size, receivers)
    me = low.shapes.stage
    record = Collective(
        "move",
        op.id,
        (stages.axis,),
        src.slot if me == ends.sender else -1,
        dst.slot if me in receivers else -1,
        (source, target),
        src.tile_rows,
    )
    exchange(low, record, lambda low, record: _expand(low, record, ends))


def _expand(low: TemplateLowering, record: Collective, ends: _Ends) -> Collective:
    """What this device's stage does: send, receive, or both."""
    src, dst, step, me, sent = ends.source, ends.target, record.step, low.shapes.stage, Sent()
    group, tiles = low.numbers.group(record.axes), num_tiles(low, src.extent, step)
    ready = signals(low, group, step, tiles, num_posting=1)
    ack = signals(low, group, step, tiles)
    per_tile, mode = not is_single(step), Mode.WHOLE if is_single(step) else Mode.ROW
    others = [stage for stage in ends.receivers if stage != ends.sender]

    def acknowledged(ref: Ref, increment: Number, use: Number) -> None:
        task = low.hold(ref.extent, step, Operand(ref.slot, mode), f"{low.op.label}/ack")
        task.waits += [
            Wait(ack.first + r * tiles, per_tile, increment, group.number, r, ref.slot, use) for r in others
        ]

    if me == ends.sender:
        offer = low.hold(src.extent, step, Operand(src.slot, mode), f"{low.op.label}/offer")
        offer.notifies += [Notify(group.number, r, ready.first, per_tile, src.slot, sent.use) for r in others]
    if me in ends.receivers:
        theirs = Operand(src.slot, mode)
        if me != ends.sender:
            theirs = theirs._replace(group=group.number, member=ends.sender)
        copied: Tiles = {"dst": [Operand(dst.slot, mode)], "src": [theirs]}
        copy = low.emit("copy_pairs", over=dst, step=step, dtype=dst.dtype, tiles=copied, priority=2)
        if me != ends.sender:
            copy.waits.append(Wait(ready.first, per_tile, 1, group.number, ends.sender, src.slot, sent.use))
            acks = ack.first + me * tiles
            copy.notifies.append(Notify(group.number, ends.sender, acks, per_tile, src.slot, sent.use))
    if me == ends.sender:
        acknowledged(ends.before, sent.before, sent.use_before)
        acknowledged(src, sent.drain, sent.use)
    return record
