"""Exchanges between storage layout and compute layout: all-gathers of parameters, and sums that are
delivered in storage shards.

With sharded state, each device stores only a shard of a weight between steps (storage layout). Ops
read the whole weight (compute layout).

A storage shard is a run of whole panels (blocks of 32 rows) of dim 0, so the rows of a group's
members are adjacent in the compute layout. If there are fewer panels than members, some storage
shards are empty. Loops over empty shards have no tasks, posts or waits.

    all_gather_parameters  copies the storage shards of all members (all_gather.py).
    reduce_to_shards       for each storage shard an empty task waits until this device has written its rows into its
                           part, and posts `ready` on the shard's owner. The owner adds the parts of its own rows along
                           the tree and posts `ack`. Empty tasks keep the part until all owners have read it.

A device reads the whole compute layout except its own shard in `all_gather_parameters`, and n - 1
storage shards in `reduce_to_shards`. If several members store the same storage shard (hybrid
sharding), each of them adds a share of every tile and gathers the shares that the others added.
"""

from __future__ import annotations

from tilewise.core.mesh import Axes
from tilewise.ir.graph import PANEL_ROWS, OpNode
from tilewise.ir.layout import PendingReduction, TensorLayout
from tilewise.ir.lowering import Ref, Tiles
from tilewise.ir.program import Mode, Notify, Number, Operand, Reduction, Wait, upper
from tilewise.plan.collectives.all_gather import Rows, all_gather_rows, collect_rows
from tilewise.plan.collectives.handshake import (
    TREES,
    ClassLowering,
    await_peers,
    group_of,
    note_reduction,
    num_tiles,
    post_to_peers,
    reduce_label,
)
from tilewise.plan.collectives.over_time import make_stack
from tilewise.plan.shapes import round_up

__all__ = ["all_gather_parameters", "reduce_to_shards"]


def all_gather_parameters(low: ClassLowering, op: OpNode, source: int, target: int) -> None:
    """Copy the storage shards of all members of a device group, one after another.

    Args:
        low: receives the instructions.
        op: the op that they belong to.
        source: a weight in storage layout.
        target: the same weight in compute layout.
    """
    _, axes = low.shapes.split_axes(low.layout(source)[0])
    collect_rows(low, op, low.flat(source), low.flat(target), axes, _shards(low, source, axes))


def reduce_to_shards(
    low: ClassLowering,
    op: OpNode,
    part: Ref,
    target: int,
    pending: PendingReduction,
    residual: int | None = None,
) -> None:
    """Add the parts of a sum over the batch for this device's storage shard.

    Args:
        low: receives the instructions.
        op: the op of the sum.
        part: this device's part of the sum, for all storage shards of its device group.
        target: the sum in storage layout.
        pending: the pending reduction of the sum: its device group, and the layout in which it is
            delivered.
        residual: a tensor in the layout of `target` that is added after the tree's root; or None.
    """
    low.completed.add(pending)
    src, dst = low.flat(part), low.flat(target)
    residual_ref = None if residual is None else low.flat(residual)
    _, cut = low.shapes.split_axes(low.layout(target)[0])
    alike = tuple(axis for axis in pending.group if axis not in cut)
    group, replicas, shards = group_of(low, pending), low.numbers.group(alike), _shards(low, target, cut)
    owners = _owners(low, pending.group, cut)
    most = max(shard.tiles for shard in shards)
    ready, ack = low.signals(group.size * most), low.signals(group.size * most)
    mine = Number(ready, most * group.me.multiple, group.me.source, group.me.which)
    for number, shard in enumerate(shards):
        rows = Operand(src.slot, Mode.ROWPART, offset=shard.first)
        offer = low.hold(op, Number(shard.rows), shard.step, rows, f"{op.label}/offer")
        offer.notifies += [Notify(group.number, m, mine, True, src.slot) for m in owners[number]]

    first = low.numbers.place(_key(low, target, "shard"), lambda device: _first_of_shard(low, target, device))
    part_of_tile = replicas.me if alike else Number(0)
    own = Operand(src.slot, Mode.ROWPART, part=part_of_tile, parts=replicas.size, offset=first)
    shard_part = own._replace(slot=dst.slot, offset=0)
    x = [own._replace(group=group.number, member=m) for m in group.members]
    step, label = upper(dst.tile_rows), reduce_label(op.label)
    is_last, begin = low.microbatch == low.shapes.settings.accumulation - 1, low.microbatch * group.size
    if pending.is_completed_per_microbatch:
        stack, on_stack = make_stack(low, target, dst, shard_part, step, group.size)
        views: Tiles = {
            "left": shard_part if is_last else on_stack,
            "carries": on_stack if begin else None,
            "x": x,
        }
        kernel, ints = "tree_resume", {"slot": begin, "finish": int(is_last)}
        number = low.pending_reductions(op, pending.partial).index(pending)
        low.reductions.append(
            Reduction(
                op.id,
                pending.partial,
                number,
                src.slot,
                dst.slot,
                stack=stack.slot,
                microbatch=low.microbatch,
            )
        )
    else:
        views = {"out": shard_part, "x": x}
        if residual_ref is not None:
            views["residual"] = shard_part._replace(slot=residual_ref.slot)
        kernel, ints = TREES[pending.combine], {}
        note_reduction(low, op, pending, src, dst, residual_ref)
    reduce = low.emit(
        kernel,
        op,
        over=dst,
        step=step,
        dtype=dst.dtype,
        tiles=views,
        ints=ints,
        priority=2,
        label=label,
    )
    await_peers(reduce, group, ready, most, src, per_index=True)
    post_to_peers(reduce, group, ack, most, src, per_index=True)
    if alike and is_last:
        tiles = num_tiles(low, dst.extent, step)
        done = low.signals(replicas.size * tiles)
        post_to_peers(reduce, replicas, done, tiles, dst, per_index=True)
        all_gather_rows(low, op, dst, done, replicas, step)
    for number, shard in enumerate(shards):
        rows = Operand(src.slot, Mode.ROWPART, offset=shard.first)
        hold = low.hold(op, Number(shard.rows), shard.step, rows, f"{op.label}/ack")
        hold.waits += [Wait(ack + m * most, True, 1, group.number, m, src.slot) for m in owners[number]]


def _shards(low: ClassLowering, tensor: int, axes: Axes) -> list[Rows]:
    """The storage shards of all members along some axes, in order. Panels are padded, as in memory."""
    spec, layout = low.spec(tensor), low.layout(tensor)
    kind = low.graph.tensors[tensor].kind
    shards = []
    for device in low.mesh.group(low.shapes.device, *axes):
        shapes = low.shapes.on(device)
        begin, end = shapes.range(spec, layout, 0)
        step = upper(shapes.tile_rows(spec, kind, Number(end - begin)))
        shards.append(Rows(_first_of_shard(low, tensor, device), round_up(end - begin, PANEL_ROWS), step))
    return shards


def _first_of_shard(low: ClassLowering, tensor: int, device: int) -> int:
    """The first row of a device's storage shard in the compute layout."""
    spec, layout = low.spec(tensor), low.layout(tensor)
    shapes = low.shapes.on(device)
    whole: TensorLayout = (shapes.split_axes(layout[0])[0], *layout[1:])
    return shapes.range(spec, layout, 0)[0] - shapes.range(spec, whole, 0)[0]


def _key(low: ClassLowering, tensor: int, what: str) -> tuple[object, ...]:
    spec = low.spec(tensor)
    return what, spec.shape[0], spec.labels[0], low.layout(tensor)[0]


def _owners(low: ClassLowering, group: Axes, cut: Axes) -> list[list[int]]:
    """For each storage shard, the places of its owners in a device group."""
    devices = low.mesh.group(low.shapes.device, *group)
    owners: list[list[int]] = [[] for _ in range(low.mesh.size(*cut))]
    for place, device in enumerate(devices):
        owners[low.mesh.coordinate(device, *cut)].append(place)
    return owners
