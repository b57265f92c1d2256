"""Sums over the batch that devices complete in every microbatch. Each row has an owner, which adds
the parts of all devices for this row and keeps the carries (partial sums of the tree between
microbatches).

Suppose that the devices of a group share each microbatch. Then the batch splits that one device has
in a whole step are not adjacent, so their sum is not a node of the tree over batch splits. But the
batch splits that the device has in one microbatch do form a node. So in every microbatch, the owner
of some rows adds the parts of all members to a stack (`tree_resume`), which works like a binary
counter and covers only the owner's share of the rows. After the last microbatch every device
gathers the shares.

A ring is several places for the parts, which the microbatches take in turn. A credit is the post by
which a reader says that it has read a place.

    producer     waits until what it wrote into this place of the ring two uses ago has been read; writes its part into
                 the ring, then posts `ready` on every peer
    reduce       waits for `ready` of every peer; adds the n parts of its own rows to its stack, then posts `credit` on
                 every peer; after the last microbatch it writes the root to the result and posts `done`
    gather       as in an all-reduce
    drain        in the last use of a step: reads the ring until all credits of the step have come

On the device that owns a part, no task stands for the peers that read it. Instead, the next writer
of the place waits for credits. How many it waits for is passed with each call, because the first
uses of a ring in a step have nothing to wait for.
"""

from __future__ import annotations

from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Ref, Tiles
from tilewise.ir.program import Collective, Mode, Number, Operand, upper
from tilewise.plan.collectives.all_gather import all_gather_rows
from tilewise.plan.collectives.handshake import (
    ClassLowering,
    acknowledge,
    await_peers,
    group_of,
    num_tiles,
    pending_of,
    post_to_peers,
    record_reduction,
    reduce_label,
)
from tilewise.plan.rings import RING_DEPTH, credit_of_drain, credit_of_write

__all__ = ["add_microbatch", "expand_add_microbatch", "make_stack"]


def add_microbatch(low: ClassLowering, tensor: int, pending: PendingReduction) -> None:
    """Add every member's part of one sum, for one microbatch, to the stacks of the owners of its
    rows.

    The instruction that was emitted last must be the one that writes this device's part, `[rows,
    cols]` in f32, into the ring.

    Args:
        low: receives the instructions; its microbatch is the current one.
        tensor: the sum.
        pending: the pending reduction of the sum: its device group, and a tree over batch splits in
            which each member has one node per microbatch.
    """
    producer, part = low.instructions[-1], low.flat(low.ring(tensor))
    total = low.flat(tensor)
    step = upper(producer.step) if low.tensor(tensor).packed else 0
    record = record_reduction(low, "add_microbatch", pending, part, total, tensor, step)
    low.exchange(record._replace(microbatch=low.microbatch), producer)


def expand_add_microbatch(low: ClassLowering, record: Collective, producer: Draft | None) -> Collective:
    """Exchange the parts of one microbatch; the owners of rows keep the sum so far on a stack."""
    assert producer is not None
    part, total, tensor = low.views[record.source], low.views[record.target], record.tensors[1]
    pending, step = pending_of(low, record), upper(record.step)
    group, microbatch = group_of(low, pending), low.microbatch
    is_last = microbatch == low.shapes.settings.accumulation - 1
    tiles, per_index = num_tiles(low, part.extent, step), step > 0
    begin = microbatch * group.size  # number of parts already on the stack

    ready, credit = low.signals(group.size * tiles), low.ring_signals(group.size * tiles)
    increment, use = credit_of_write()
    await_peers(producer, group, credit, tiles, part, per_index=per_index, increment=increment, use=use)
    post_to_peers(producer, group, ready, tiles, part, per_index=per_index)

    mine = Operand(total.slot, Mode.ROWPART, part=group.me, parts=group.size)
    stack, on_stack = make_stack(low, tensor, part, mine, step, group.size)
    views: Tiles = {
        "left": mine if is_last else on_stack,
        "carries": on_stack if begin else None,
        "x": [mine._replace(slot=part.slot, group=group.number, member=m) for m in group.members],
    }
    reduce = low.emit(
        "tree_resume",
        over=part,
        step=step,
        dtype="f32",
        tiles=views,
        ints={"slot": begin, "finish": int(is_last)},
        priority=2,
        label=reduce_label(low.op.label),
    )
    await_peers(reduce, group, ready, tiles, part, per_index=per_index)
    post_to_peers(reduce, group, credit, tiles, part, per_index=per_index)
    record = record._replace(stack=stack.slot)
    if not is_last:
        return record
    done = low.signals(group.size * tiles)
    post_to_peers(reduce, group, done, tiles, total, per_index=per_index)
    all_gather_rows(low, total, done, group, step)
    for age in reversed(range(RING_DEPTH)):
        about = low.flat(low.ring(tensor, age))
        increment, use = credit_of_drain(age)
        acknowledge(low, about, group, credit, tiles, step, increment=increment, use=use)
    return record


def make_stack(
    low: ClassLowering, tensor: int, part: Ref, mine: Operand, step: int, added: int
) -> tuple[Ref, Operand]:
    """Create the stack for this device's share of a sum, and return it with a task's view of it.
    The levels of the stack lie side by side.

    If the rows of a tile divide evenly among the group's devices, the stack holds only this
    device's shares, one after another. Otherwise it is as large as the result, and a share lies
    where it lies in the result.

    Args:
        low: creates the stack.
        tensor: the sum.
        part: the tensor with this device's part, whose rows are divided into shares.
        mine: a task's share of the rows.
        step: rows per task.
        added: number of parts that each microbatch adds.
    """
    members = upper(mine.parts)
    microbatches = low.shapes.settings.accumulation
    levels = max((j * added).bit_count() for j in range(1, microbatches))
    rows = part.extent.constant
    if step == 0 or rows <= step or step % members == 0:
        tile = max(-(-(step or rows) // members), 1)
        stack = low.stack(tensor, Number(-(-rows // members)), levels * part.cols, tile)
        return stack, Operand(stack.slot, Mode.ROW, div=members)
    stack = low.stack(tensor, part.extent, levels * part.cols, step)
    return stack, mine._replace(slot=stack.slot)
