"""Exchanges along columns: gathering the columns of row tiles from peers (on all devices, or on the
first of the axes that shard them), slicing them, or summing them so that each device gets a shard
of the columns.

In a gather, a task `offer` reads a device's part and posts the signal `ready` on every peer (the
other members of the device group). The copy waits for `ready` of all peers and posts `ack`. An
empty task stays a reader of the part until all peers have read it, so that nothing overwrites it. A
gather reads the part of its result that the device does not have.

A slice transfers nothing between devices. In a sum that is delivered in shards, each device
combines its own columns. It reads (n - 1)/n of a tile, half as much as in an all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.core.errors import PlanError
from tilewise.core.mesh import Axes
from tilewise.core.tree import Interval
from tilewise.ir.layout import TensorLayout, show_layout
from tilewise.ir.lowering import Draft, Tiles
from tilewise.ir.program import Collective, Mode, Notify, Operand, is_single
from tilewise.plan.collectives.handshake import (
    emit_gather,
    emit_reduce,
    exchange,
    group_of,
    num_tiles,
    pending_of,
    residual_of,
    signals,
    tree_kernel,
)

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = ["all_gather_columns", "columns_in_group", "expand_reduce_scatter", "gather", "slice_columns"]

_COPIED = ("f32", "bf16", "i32")


def slice_columns(low: TemplateLowering, source: int, target: int) -> None:
    """Copy this device's columns of every row tile.

    Raises:
        PlanError: the change is not one of columns only.
    """
    _columns(low, source, target)
    src, dst = low.tensor(source), low.tensor(target)
    begin, end = _range(low, target, low.shapes.device)
    spec = low.spec(source)
    key = "slice", spec.shape[-1], spec.labels[-1], low.layout(source)[-1], low.layout(target)[-1]
    skipped = low.numbers.place(key, lambda d: _range(low, target, d)[0] - _range(low, source, d)[0])
    part = Operand(src.slot, Mode.ROWCOLS, part=skipped, parts=end - begin)
    tiles: Tiles = {"dst": [Operand(dst.slot, Mode.ROW)], "src": [part]}
    low.emit("copy_pairs", over=dst, step=low.row_step(dst), dtype=dst.dtype, tiles=tiles)


def all_gather_columns(low: TemplateLowering, source: int, target: int) -> None:
    """Copy the columns of all devices that share a row tile.

    Raises:
        PlanError: the change is not one of columns only.
    """
    axes = _columns(low, source, target)
    src, dst = low.tensor(source), low.tensor(target)
    first = _range(low, target, low.shapes.device)[0]
    ranges = (_range(low, source, device) for device in low.mesh.group(low.shapes.device, *axes))
    parts = tuple((begin - first, end - first) for begin, end in ranges)
    tensors, step = (source, target), low.row_step(src)
    record = Collective("all_gather_columns", low.op.id, axes, src.slot, dst.slot, tensors, step, parts)
    exchange(low, record, _expand_all_gather)


def _expand_all_gather(low: TemplateLowering, record: Collective) -> Collective:
    """Every device offers its columns, and copies those of all members next to each other."""
    src, dst, step = low.views[record.source], low.views[record.target], record.step
    group, tiles = low.numbers.group(record.axes), num_tiles(low, src.extent, step)
    ready, ack = signals(low, group, step, tiles), signals(low, group, step, tiles)
    ready.offer(low, src)
    operand = Operand(src.slot, Mode.ROW)
    own = [Operand(dst.slot, Mode.ROWCOLS, part=b, parts=e - b) for b, e in record.parts]
    theirs = [operand._replace(group=group.number, member=q) for q in range(group.size)]
    copy = emit_gather(low, src, step, dst.dtype, own, theirs)
    ready.wait(copy, src)
    ack.post(copy, src)
    ack.acknowledge(low, src)
    return record


def gather(low: TemplateLowering, source: int, target: int) -> None:
    """Copy all column shards of a tensor to the first device of the axes that shard it."""
    src, dst, axes = low.tensor(source), low.tensor(target), low.layout(source)[-1]
    parts = tuple(_range(low, source, d) for d in low.mesh.group(low.shapes.device, *axes))
    is_first = low.mesh.coordinate(low.shapes.device, *axes) == 0  # first devices are in classes of their own
    to, tensors, step = dst.slot if is_first else -1, (source, target), low.row_step(src)
    exchange(low, Collective("gather", low.op.id, axes, src.slot, to, tensors, step, parts), _expand_gather)


def _expand_gather(low: TemplateLowering, record: Collective) -> Collective:
    """The first device copies; the others post that their shard is ready, and hold it until it has
    been read.
    """
    src, step = low.views[record.source], record.step
    group, tiles = low.numbers.group(record.axes), num_tiles(low, src.extent, step)
    ready, ack = signals(low, group, step, tiles), signals(low, group, step, tiles, num_posting=1)
    operand = Operand(src.slot, Mode.ROW)
    if record.target < 0:
        ready.offer(low, src, [0])
        ack.wait_for(low.hold(src.extent, step, operand, f"{low.op.label}/ack"), src, [0])
        return record
    dst, others = low.views[record.target], range(1, group.size)
    own = [Operand(dst.slot, Mode.ROWCOLS, part=b, parts=e - b) for b, e in record.parts]
    theirs = [operand, *(operand._replace(group=group.number, member=q) for q in others)]
    copy = emit_gather(low, src, step, dst.dtype, own, theirs)
    ready.wait_for(copy, src, others)
    copy.notifies += [Notify(group.number, q, ack.first, True, src.slot) for q in others]
    return record


def expand_reduce_scatter(low: TemplateLowering, record: Collective, producer: Draft) -> Collective:
    """Combine this device's columns of the parts of all members, tile by tile."""
    src, dst, step = low.views[record.source], low.views[record.target], record.step
    pending, target = pending_of(low, record), record.tensors[1]
    group, tiles = group_of(low, pending), num_tiles(low, src.extent, step)
    ready, ack = signals(low, group, step, tiles), signals(low, group, step, tiles)
    ready.post(producer, src)

    spec, layout = low.spec(target), low.layout(target)
    begin, end = _range(low, target, low.shapes.device)
    key = "shard", spec.shape[-1], spec.labels[-1], layout[-1], _whole(layout, pending.group)
    first = low.numbers.place(key, lambda device: columns_in_group(low, target, pending.group, device)[0])
    part = Operand(src.slot, Mode.ROWCOLS, part=first, parts=end - begin, group=group.number)
    out = Operand(dst.slot, Mode.WHOLE if is_single(step) else Mode.ROW)
    views: Tiles = {
        "out": out,
        "x": [part._replace(member=m) for m in group.members],
        **residual_of(low, record, out),
    }
    reduce = emit_reduce(low, tree_kernel(pending.combine, src), src, step, dst.dtype, views)
    ready.wait(reduce, src)
    ack.post(reduce, src)
    ack.acknowledge(low, src)
    return record


def columns_in_group(low: TemplateLowering, tensor: int, group: Axes, device: int) -> Interval:
    """A device's columns of a tensor among those that its device group has together."""
    spec, layout, shapes = low.spec(tensor), low.layout(tensor), low.shapes.on(device)
    dim = len(spec.shape) - 1
    begin, end = shapes.range(spec, layout, dim)
    first = shapes.range(spec, (*layout[:-1], _whole(layout, group)), dim)[0]
    return begin - first, end - first


def _whole(layout: TensorLayout, group: Axes) -> Axes:
    """The axes of the last dim without those of a device group."""
    return tuple(axis for axis in layout[-1] if axis not in group)


def _columns(low: TemplateLowering, source: int, target: int) -> Axes:
    """The axes along which the last dim changes."""
    spec, before, after = low.spec(source), low.layout(source), low.layout(target)
    short, long = sorted((before[-1], after[-1]), key=len)
    if spec.storage not in ("rows", "vector") or spec.dtype.name not in _COPIED or before[:-1] != after[:-1]:
        raise PlanError(
            "[plan.reshards] layouts may change only along the last dim of rows and vectors in f32, bf16 or i32; got "
            f"{spec.storage} {spec} from {show_layout(before)} to {show_layout(after)} at "
            f"{low.op.label!r}; give both sides one layout"
        )
    return long[len(short) :]


def _range(low: TemplateLowering, tensor: int, device: int) -> tuple[int, int]:
    spec = low.spec(tensor)
    return low.shapes.on(device).range(spec, low.layout(tensor), len(spec.shape) - 1)
