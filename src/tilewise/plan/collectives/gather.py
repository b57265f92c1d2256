"""Gather: copies the column shards of a tensor to the first device of the axes that shard it."""

from __future__ import annotations

from tilewise.ir.graph import OpNode
from tilewise.ir.lowering import Tiles
from tilewise.ir.program import Mode, Notify, Number, Operand, Wait
from tilewise.plan.collectives.handshake import ClassLowering, gather_label, num_tiles

__all__ = ["gather"]


def gather(low: ClassLowering, op: OpNode, source: int, target: int) -> None:
    """Copy all shards to the first device. Every other device posts that its shard is ready, and
    keeps the shard unchanged until the first device has read it.
    """
    src, dst = low.tensor(source), low.tensor(target)
    axes, step = low.layout(source)[-1], low.row_step(src)
    group = low.numbers.group(axes)
    n, tiles = group.size, num_tiles(low, src.extent, step)
    ready, ack = low.signals(n * tiles), low.signals(tiles)
    operand = Operand(src.slot, Mode.ROW)
    if low.mesh.coordinate(low.shapes.device, *axes) > 0:  # first devices are in classes of their own
        offer = low.hold(op, src.extent, step, operand, f"{op.label}/offer")
        mine = Number(ready, tiles, group.me.source, group.me.which)
        offer.notifies.append(Notify(group.number, 0, mine, True, src.slot))
        task = low.hold(op, src.extent, step, operand, f"{op.label}/ack")
        task.waits.append(Wait(ack, True, 1, group.number, 0, src.slot))
        return
    spec, layout = low.spec(source), low.layout(source)
    members = low.mesh.group(low.shapes.device, *axes)
    ranges = [low.shapes.on(d).range(spec, layout, len(spec.shape) - 1) for d in members]
    pairs: Tiles = {
        "dst": [Operand(dst.slot, Mode.ROWCOLS, part=begin, parts=end - begin) for begin, end in ranges],
        "src": [operand, *(operand._replace(group=group.number, member=q) for q in range(1, n))],
    }
    label = gather_label(op.label)
    copy = low.emit(
        "copy_pairs", op, over=src, step=step, dtype=dst.dtype, tiles=pairs, priority=2, label=label
    )
    copy.waits += [Wait(ready + q * tiles, True, 1, group.number, q, src.slot) for q in range(1, n)]
    copy.notifies += [Notify(group.number, q, ack, True, src.slot) for q in range(1, n)]
