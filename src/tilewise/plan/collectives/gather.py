"""Gather: copies the column shards of a tensor to the first device of the axes that shard it."""

from __future__ import annotations

from tilewise.ir.lowering import Draft, Tiles
from tilewise.ir.program import Collective, Mode, Notify, Number, Operand, Wait
from tilewise.plan.collectives.handshake import ClassLowering, gather_label, num_tiles

__all__ = ["expand_gather", "gather"]


def gather(low: ClassLowering, source: int, target: int) -> None:
    """Copy all column shards of a tensor to the first device of the axes that shard it."""
    src, dst = low.tensor(source), low.tensor(target)
    spec, layout = low.spec(source), low.layout(source)
    axes = layout[-1]
    members = low.mesh.group(low.shapes.device, *axes)
    parts = tuple(low.shapes.on(d).range(spec, layout, len(spec.shape) - 1) for d in members)
    is_first = low.mesh.coordinate(low.shapes.device, *axes) == 0  # first devices are in classes of their own
    to = dst.slot if is_first else -1
    low.exchange(
        Collective("gather", low.op.id, axes, src.slot, to, (source, target), low.row_step(src), parts)
    )


def expand_gather(low: ClassLowering, record: Collective, producer: Draft | None) -> Collective:
    """The first device copies; the others post that their shard is ready, and hold it until it has
    been read.
    """
    src, step = low.views[record.source], record.step
    group = low.numbers.group(record.axes)
    n, tiles = group.size, num_tiles(low, src.extent, step)
    ready, ack = low.signals(n * tiles), low.signals(tiles)
    operand = Operand(src.slot, Mode.ROW)
    if record.target < 0:
        offer = low.hold(src.extent, step, operand, f"{low.op.label}/offer")
        mine = Number(ready, tiles, group.me.source, group.me.which)
        offer.notifies.append(Notify(group.number, 0, mine, True, src.slot))
        task = low.hold(src.extent, step, operand, f"{low.op.label}/ack")
        task.waits.append(Wait(ack, True, 1, group.number, 0, src.slot))
        return record
    dst = low.views[record.target]
    pairs: Tiles = {
        "dst": [
            Operand(dst.slot, Mode.ROWCOLS, part=begin, parts=end - begin) for begin, end in record.parts
        ],
        "src": [operand, *(operand._replace(group=group.number, member=q) for q in range(1, n))],
    }
    label = gather_label(low.op.label)
    copy = low.emit("copy_pairs", over=src, step=step, dtype=dst.dtype, tiles=pairs, priority=2, label=label)
    copy.waits += [Wait(ready + q * tiles, True, 1, group.number, q, src.slot) for q in range(1, n)]
    copy.notifies += [Notify(group.number, q, ack, True, src.slot) for q in range(1, n)]
    return record
