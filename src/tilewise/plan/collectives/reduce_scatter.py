"""Reduce-scatter along rows: every device of a group combines the partial values of all members,
for its own part of a tile's rows.
"""

from __future__ import annotations

from tilewise.ir.lowering import Draft, Ref, Tiles
from tilewise.ir.program import Mode, NumberLike, Operand, is_single
from tilewise.plan.classes import DeviceGroup
from tilewise.plan.collectives.handshake import (
    TREES,
    ClassLowering,
    acknowledge,
    await_peers,
    num_tiles,
    post_to_peers,
    reduce_label,
    residual_operand,
)

__all__ = ["reduce_scatter_rows"]


def reduce_scatter_rows(
    low: ClassLowering,
    producer: Draft,
    src: Ref,
    dst: Ref,
    residual: Ref | None,
    combine: str,
    group: DeviceGroup,
    step: NumberLike,
) -> int:
    """Combine this device's part of the rows of every tile, from the parts of all members in the
    device group's order.

    Args:
        low: receives the instructions.
        producer: the instruction that writes `src`, over the same tiles.
        src: `[rows, cols]`, a partial value on every member.
        dst: the same rows and columns, of which this device's part is written; may be `src`.
        residual: a tensor that is added after the tree's root: it has the shape of `dst`, or one
            row that is added to all rows; or None.
        combine: `sum`, `max` or `or`.
        group: the members.
        step: rows per task; 0 for one task over all rows.

    Returns:
        The start of the range of signals that members post when their part is ready.
    """
    tiles, per_index = num_tiles(low, src.extent, step), not is_single(step)
    ready, done = low.signals(group.size * tiles), low.signals(group.size * tiles)
    post_to_peers(producer, group, ready, tiles, src, per_index=per_index)

    part = Operand(dst.slot, Mode.ROWPART, part=group.me, parts=group.size)
    views: Tiles = {
        "out": part,
        "x": [part._replace(slot=src.slot, group=group.number, member=m) for m in group.members],
        **({"residual": residual_operand(residual, dst, part)} if residual is not None else {}),
    }
    label = reduce_label(low.op.label)
    reduce = low.emit(
        TREES[combine], over=src, step=step, dtype=dst.dtype, tiles=views, priority=2, label=label
    )
    await_peers(reduce, group, ready, tiles, src, per_index=per_index)
    post_to_peers(reduce, group, done, tiles, dst, per_index=per_index)
    # in place, `done` of a peer means that it has read the part that the gather overwrites
    if src.slot != dst.slot:
        ack = low.signals(group.size * tiles)
        post_to_peers(reduce, group, ack, tiles, src, per_index=per_index)
        acknowledge(low, src, group, ack, tiles, step)
    return done
