"""All-gather along rows: every device copies the parts of a tile that its peers have made."""

from __future__ import annotations

from tilewise.ir.graph import OpNode
from tilewise.ir.lowering import Ref, Tiles
from tilewise.ir.program import Mode, NumberLike, Operand, is_single
from tilewise.plan.classes import Team
from tilewise.plan.collectives.handshake import (
    ClassLowering,
    acknowledge,
    await_peers,
    gather_label,
    num_tiles,
    raise_on_peers,
)

__all__ = ["all_gather_rows"]


def all_gather_rows(
    low: ClassLowering, op: OpNode, dst: Ref, done: int, team: Team, step: NumberLike
) -> None:
    """Copy every peer's part of each tile, once its signal says that it is there.

    Args:
        low: takes the instructions.
        op: for whom.
        dst: `[rows, cols]`; member k of the team has made part k of the rows of every tile, on its own device.
        done: site of the signals that say so, one raised by each member.
        team: the members.
        step: rows per task; 0 for one task over all.
    """
    tiles, per_index = num_tiles(low, dst.extent, step), not is_single(step)
    ack = low.signals(team.size * tiles)
    own = [Operand(dst.slot, Mode.ROWPART, part=p, parts=team.size) for p in team.peers]
    views: Tiles = {
        "dst": own,
        "src": [o._replace(team=team.number, member=m) for o, m in zip(own, team.peer_members)],
    }
    label = gather_label(op.label)
    gather = low.emit(
        "copy_pairs", op, over=dst, step=step, dtype=dst.dtype, tiles=views, priority=2, label=label
    )
    await_peers(gather, team, done, tiles, dst, per_index=per_index)
    raise_on_peers(gather, team, ack, tiles, dst, per_index=per_index)
    acknowledge(low, op, dst, team, ack, tiles, step)
