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

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Ref
from tilewise.ir.program import Collective, Mode, Number, Operand, upper
from tilewise.plan.classes import PeerGroup
from tilewise.plan.collectives.handshake import (
    emit_reduce,
    exchange,
    group_of,
    num_tiles,
    pending_of,
    record_reduction,
    signals,
)
from tilewise.plan.collectives.rows import all_gather_rows
from tilewise.plan.rings import RING_DEPTH, credit_of_call

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = ["add_microbatch", "add_to_stack"]


def add_microbatch(low: TemplateLowering, tensor: int, pending: PendingReduction) -> None:
    """Add every member's part of one sum, for one microbatch, to the stacks of the owners of its
    rows.

    The instruction that was emitted last must be the one that writes this device's part, `[rows,
    cols]` in f32, into the ring.

    Args:
        tensor: the sum.
        pending: the pending reduction of the sum: its device group, and a tree over batch splits in
            which each member has one node per microbatch.
    """
    producer, part = low.instructions[-1], low.flat(low.ring(tensor))
    total = low.flat(tensor)
    step = upper(producer.step) if low.tensor(tensor).packed else 0
    record = record_reduction(low, "add_microbatch", pending, part, total, tensor, step)
    exchange(low, record._replace(microbatch=low.microbatch), _expand, producer)


def _expand(low: TemplateLowering, record: Collective, producer: Draft) -> Collective:
    """Exchange the parts of one microbatch; the owners of rows keep the sum so far on a stack."""
    part, total, tensor = low.views[record.source], low.views[record.target], record.tensors[1]
    group, step = group_of(low, pending_of(low, record)), upper(record.step)
    tiles = num_tiles(low, part.extent, step)
    ready, credit = signals(low, group, step, tiles), signals(low, group, step, tiles, in_ring=True)
    credit.wait(producer, part, *credit_of_call(0))
    ready.post(producer, part)

    mine = Operand(total.slot, Mode.ROWPART, part=group.me, parts=group.size)
    x = [mine._replace(slot=part.slot, group=group.number, member=m) for m in group.members]
    reduce, stack = add_to_stack(low, tensor, part, mine, x, step, group)
    ready.wait(reduce, part)
    credit.post(reduce, part)
    record = record._replace(stack=stack)
    if not low.is_last_microbatch:
        return record
    done = signals(low, group, step, tiles)
    done.post(reduce, total)
    all_gather_rows(low, total, done)
    for age in reversed(range(RING_DEPTH)):
        credit.acknowledge(low, low.flat(low.ring(tensor, age)), *credit_of_call(1 + age))
    return record


def add_to_stack(
    low: TemplateLowering,
    tensor: int,
    over: Ref,
    mine: Operand,
    x: Sequence[Operand],
    step: int,
    group: PeerGroup,
) -> tuple[Draft, int]:
    """Append the instruction that adds the parts of all members of a group, for one microbatch, to
    the stack of this device's share of a sum. After the last microbatch it writes the sum instead.

    Args:
        tensor: the sum.
        over: the tensor whose rows are divided into shares.
        mine: a task's share of the sum.
        x: the members' parts of this share.
        step: rows per task.
        group: the members.

    Returns:
        The instruction, and the slot of the stack.
    """
    stack, on_stack = _make_stack(low, tensor, over, mine, step, group.size)
    begin = low.microbatch * group.size  # number of parts already on the stack
    views = {
        "left": mine if low.is_last_microbatch else on_stack,
        "carries": on_stack if begin else None,
        "x": x,
    }
    ints = {"slot": begin, "finish": int(low.is_last_microbatch)}
    return emit_reduce(low, "tree_resume", over, step, "f32", views, ints), stack.slot


def _make_stack(
    low: TemplateLowering, tensor: int, part: Ref, mine: Operand, step: int, added: int
) -> tuple[Ref, Operand]:
    """Create the stack for this device's share of a sum, and return it with a task's view of it.
    The levels of the stack lie side by side. `added` is the number of parts that each microbatch
    adds; the other arguments are those of `add_to_stack`.

    If the rows of a tile divide evenly among the group's devices, the stack holds only this
    device's shares, one after another. Otherwise it is as large as the result, and a share lies
    where it lies in the result.
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
