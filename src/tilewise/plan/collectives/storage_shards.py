"""Exchanges between storage layout and compute layout: all-gathers of parameters, and sums that are
delivered in storage shards.

With sharded state, each device stores only a shard of a weight between steps (storage layout). Ops
read the whole weight (compute layout).

A storage shard is a run of whole panels (blocks of 32 rows) of dim 0, so the rows of a group's
members are adjacent in the compute layout. If there are fewer panels than members, some storage
shards are empty. Loops over empty shards have no tasks, posts or waits.

    all_gather_parameters  copies the storage shards of all members (`collect_rows`).
    reduce_to_shards       for each storage shard an empty task waits until this device has written its rows into its
                           part, and posts `ready` on the shard's owner. The owner adds the parts of its own rows along
                           the tree and posts `ack`. Empty tasks keep the part until all owners have read it.

A device reads the whole compute layout except its own shard in `all_gather_parameters`, and n - 1
storage shards in `reduce_to_shards`. If several members store the same storage shard (hybrid
sharding), each of them adds a share of every tile and gathers the shares that the others added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.core.mesh import Axes
from tilewise.core.tree import Interval
from tilewise.ir.graph import PANEL_ROWS
from tilewise.ir.layout import PendingReduction, TensorLayout
from tilewise.ir.lowering import Ref, Tiles
from tilewise.ir.program import Collective, Mode, Number, Operand, upper
from tilewise.plan.collectives.handshake import (
    emit_reduce,
    exchange,
    group_of,
    num_tiles,
    pending_of,
    record_reduction,
    residual_of,
    signals,
    tree_kernel,
)
from tilewise.plan.collectives.over_time import add_to_stack
from tilewise.plan.collectives.rows import Rows, all_gather_rows, collect_rows
from tilewise.plan.shapes import round_up

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = ["all_gather_parameters", "reduce_to_shards"]


def all_gather_parameters(low: TemplateLowering, source: int, target: int) -> None:
    """Copy the storage shards of all members of a device group, one after another.

    Args:
        source: a weight in storage layout.
        target: the same weight in compute layout.
    """
    _, axes = low.shapes.split_axes(low.layout(source)[0])
    src, dst, tensors = low.flat(source), low.flat(target), (source, target)
    step, parts = src.tile_rows, _parts(low, source, axes)
    record = Collective("all_gather_parameters", low.op.id, axes, src.slot, dst.slot, tensors, step, parts)
    exchange(low, record, _expand_all_gather)


def _expand_all_gather(low: TemplateLowering, record: Collective) -> Collective:
    """One copy per storage shard, in the order of the device group."""
    src, dst = low.views[record.source], low.views[record.target]
    collect_rows(low, src, dst, record.axes, _shards(low, record.tensors[0], record.axes, record.parts))
    return record


def reduce_to_shards(
    low: TemplateLowering,
    part: Ref,
    target: int,
    pending: PendingReduction,
    residual: int | None = None,
) -> None:
    """Add the parts of a sum over the batch for this device's storage shard.

    Args:
        part: this device's part of the sum, for all storage shards of its device group.
        target: the sum in storage layout.
        pending: the pending reduction of the sum: its device group, and the layout in which it is
            delivered.
        residual: a tensor in the layout of `target` that is added after the tree's root; or None.
    """
    src, dst = low.flat(part), low.flat(target)
    record = record_reduction(low, "reduce_to_shards", pending, src, dst, target, upper(dst.tile_rows))
    record = record._replace(
        residual=-1 if residual is None else low.flat(residual).slot,
        microbatch=low.microbatch if pending.is_completed_per_microbatch else -1,
        parts=_parts(low, target, low.shapes.split_axes(low.layout(target)[0])[1]),
    )
    exchange(low, record, _expand_reduce)


def _expand_reduce(low: TemplateLowering, record: Collective) -> Collective:
    """Every device offers its rows of each storage shard; the owner combines those of its own."""
    src, dst, target = low.views[record.source], low.views[record.target], record.tensors[1]
    pending, step = pending_of(low, record), upper(record.step)
    _, cut = low.shapes.split_axes(low.layout(target)[0])
    alike = tuple(axis for axis in pending.group if axis not in cut)
    group, replicas = group_of(low, pending), low.numbers.group(alike)
    shards = _shards(low, target, cut, record.parts)
    owners = _owners(low, pending.group, cut)
    most = max(shard.tiles for shard in shards)
    ready, ack = signals(low, group, step, most), signals(low, group, step, most)
    rows = [Operand(src.slot, Mode.ROWPART, offset=shard.first) for shard in shards]
    for number, shard in enumerate(shards):
        offer = low.hold(Number(shard.rows), shard.step, rows[number], f"{low.op.label}/offer")
        ready.post(offer, src, owners[number])

    spec = low.spec(target)
    key = "shard", spec.shape[0], spec.labels[0], low.layout(target)[0]
    first = low.numbers.place(key, lambda device: _first_of_shard(low, target, device))
    part_of_tile = replicas.me if alike else Number(0)
    own = Operand(src.slot, Mode.ROWPART, part=part_of_tile, parts=replicas.size, offset=first)
    shard_part = own._replace(slot=dst.slot, offset=0)
    x = [own._replace(group=group.number, member=m) for m in group.members]
    if pending.is_completed_per_microbatch:
        reduce, stack = add_to_stack(low, target, dst, shard_part, x, step, group)
        record = record._replace(stack=stack)
    else:
        views: Tiles = {"out": shard_part, "x": x, **residual_of(low, record, shard_part)}
        reduce = emit_reduce(low, tree_kernel(pending.combine, src), dst, step, dst.dtype, views)
    ready.wait(reduce, src)
    ack.post(reduce, src)
    if alike and low.is_last_microbatch:
        done = signals(low, replicas, step, num_tiles(low, dst.extent, step))
        done.post(reduce, dst)
        all_gather_rows(low, dst, done)
    for number, shard in enumerate(shards):
        hold = low.hold(Number(shard.rows), shard.step, rows[number], f"{low.op.label}/ack")
        ack.wait_for(hold, src, owners[number])
    return record


def _parts(low: TemplateLowering, tensor: int, axes: Axes) -> tuple[Interval, ...]:
    """The rows of all members' storage shards in the compute layout. Panels are padded, as in memory."""
    spec, layout, parts = low.spec(tensor), low.layout(tensor), []
    for device in low.mesh.group(low.shapes.device, *axes):
        begin, end = low.shapes.on(device).range(spec, layout, 0)
        first = _first_of_shard(low, tensor, device)
        parts.append((first, first + round_up(end - begin, PANEL_ROWS)))
    return tuple(parts)


def _shards(low: TemplateLowering, tensor: int, axes: Axes, parts: Sequence[Interval]) -> list[Rows]:
    """The storage shards of all members along some axes, each with its rows per tile."""
    spec, layout, kind = low.spec(tensor), low.layout(tensor), low.graph.tensors[tensor].kind
    shards = []
    for device, (first, last) in zip(low.mesh.group(low.shapes.device, *axes), parts):
        shapes = low.shapes.on(device)
        begin, end = shapes.range(spec, layout, 0)
        step = upper(shapes.tile_rows(spec, kind, Number(end - begin)))
        shards.append(Rows(first, last - first, step))
    return shards


def _first_of_shard(low: TemplateLowering, tensor: int, device: int) -> int:
    """The first row of a device's storage shard in the compute layout."""
    spec, layout = low.spec(tensor), low.layout(tensor)
    shapes = low.shapes.on(device)
    whole: TensorLayout = (shapes.split_axes(layout[0])[0], *layout[1:])
    return shapes.range(spec, layout, 0)[0] - shapes.range(spec, whole, 0)[0]


def _owners(low: TemplateLowering, group: Axes, cut: Axes) -> list[list[int]]:
    """For each storage shard, the places of its owners in a device group."""
    devices = low.mesh.group(low.shapes.device, *group)
    owners: list[list[int]] = [[] for _ in range(low.mesh.size(*cut))]
    for place, device in enumerate(devices):
        owners[low.mesh.coordinate(device, *cut)].append(place)
    return owners
