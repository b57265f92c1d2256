"""Exchanges along columns: gathering the columns of row tiles from peers, slicing them, or summing
them so that each device gets a shard of the columns.

In a gather, a task `offer` reads a device's part and posts the signal `ready` on every peer (the
other members of the device group). The copy waits for `ready` of all peers and posts `ack`. An
empty task stays a reader of the part until all peers have read it, so that nothing overwrites it. A
gather reads the part of its result that the device does not have.

A slice transfers nothing between devices. In a sum that is delivered in shards, each device
combines its own columns. It reads (n - 1)/n of a tile, half as much as in an all-reduce.
"""

from __future__ import annotations

from tilewise.core.errors import PlanError
from tilewise.core.mesh import Axes
from tilewise.core.tree import Interval
from tilewise.ir.layout import TensorLayout, show_layout
from tilewise.ir.lowering import Draft, Tiles
from tilewise.ir.program import Collective, Mode, Operand, is_single
from tilewise.plan.collectives.handshake import (
    TREES,
    ClassLowering,
    acknowledge,
    await_peers,
    gather_label,
    group_of,
    num_tiles,
    pending_of,
    post_to_peers,
    reduce_label,
    residual_operand,
)

__all__ = [
    "all_gather_columns",
    "columns_in_group",
    "expand_all_gather_columns",
    "expand_reduce_scatter",
    "slice_columns",
]

_COPIED = ("f32", "bf16")


def slice_columns(low: ClassLowering, source: int, target: int) -> None:
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


def all_gather_columns(low: ClassLowering, source: int, target: int) -> None:
    """Copy the columns of all devices that share a row tile.

    Raises:
        PlanError: the change is not one of columns only.
    """
    axes = _columns(low, source, target)
    src, dst = low.tensor(source), low.tensor(target)
    first = _range(low, target, low.shapes.device)[0]
    ranges = (_range(low, source, device) for device in low.mesh.group(low.shapes.device, *axes))
    parts = tuple((begin - first, end - first) for begin, end in ranges)
    low.exchange(
        Collective(
            "all_gather_columns",
            low.op.id,
            axes,
            src.slot,
            dst.slot,
            (source, target),
            low.row_step(src),
            parts,
        ),
    )


def expand_all_gather_columns(low: ClassLowering, record: Collective, producer: Draft | None) -> Collective:
    """Every device offers its columns, and copies those of all members next to each other."""
    src, dst, step = low.views[record.source], low.views[record.target], record.step
    group = low.numbers.group(record.axes)
    tiles = num_tiles(low, src.extent, step)
    ready, ack = low.signals(group.size * tiles), low.signals(group.size * tiles)
    operand = Operand(src.slot, Mode.ROW)
    offer = low.hold(src.extent, step, operand, f"{low.op.label}/offer")
    post_to_peers(offer, group, ready, tiles, src, per_index=True)
    pairs: Tiles = {
        "dst": [Operand(dst.slot, Mode.ROWCOLS, part=b, parts=e - b) for b, e in record.parts],
        "src": [operand._replace(group=group.number, member=q) for q in range(group.size)],
    }
    label = gather_label(low.op.label)
    copy = low.emit("copy_pairs", over=src, step=step, dtype=dst.dtype, tiles=pairs, priority=2, label=label)
    await_peers(copy, group, ready, tiles, src, per_index=True)
    post_to_peers(copy, group, ack, tiles, src, per_index=True)
    acknowledge(low, src, group, ack, tiles, step)
    return record


def expand_reduce_scatter(low: ClassLowering, record: Collective, producer: Draft | None) -> Collective:
    """Combine this device's columns of the parts of all members, tile by tile."""
    assert producer is not None
    src, dst, step = low.views[record.source], low.views[record.target], record.step
    residual = None if record.residual < 0 else low.views[record.residual]
    pending, target = pending_of(low, record), record.tensors[1]
    group = group_of(low, pending)
    tiles, per_index = num_tiles(low, src.extent, step), not is_single(step)
    ready, ack = low.signals(group.size * tiles), low.signals(group.size * tiles)
    post_to_peers(producer, group, ready, tiles, src, per_index=per_index)

    spec, layout = low.spec(target), low.layout(target)
    begin, end = _range(low, target, low.shapes.device)
    key = "shard", spec.shape[-1], spec.labels[-1], layout[-1], _whole(layout, pending.group)
    first = low.numbers.place(key, lambda device: columns_in_group(low, target, pending.group, device)[0])
    part = Operand(src.slot, Mode.ROWCOLS, part=first, parts=end - begin, group=group.number)
    tile_mode = Mode.ROW if per_index else Mode.WHOLE
    views: Tiles = {
        "out": Operand(dst.slot, tile_mode),
        "x": [part._replace(member=m) for m in group.members],
        **(
            {"residual": residual_operand(residual, dst, Operand(dst.slot, tile_mode))}
            if residual is not None
            else {}
        ),
    }
    kernel, label = TREES[pending.combine], reduce_label(low.op.label)
    reduce = low.emit(kernel, over=src, step=step, dtype=dst.dtype, tiles=views, priority=2, label=label)
    await_peers(reduce, group, ready, tiles, src, per_index=per_index)
    post_to_peers(reduce, group, ack, tiles, src, per_index=per_index)
    acknowledge(low, src, group, ack, tiles, step)
    return record


def columns_in_group(low: ClassLowering, tensor: int, group: Axes, device: int) -> Interval:
    """A device's columns of a tensor among those that its device group has together."""
    spec, layout, shapes = low.spec(tensor), low.layout(tensor), low.shapes.on(device)
    dim = len(spec.shape) - 1
    begin, end = shapes.range(spec, layout, dim)
    first = shapes.range(spec, (*layout[:-1], _whole(layout, group)), dim)[0]
    return begin - first, end - first


def _whole(layout: TensorLayout, group: Axes) -> Axes:
    """The axes of the last dim without those of a device group."""
    return tuple(axis for axis in layout[-1] if axis not in group)


def _columns(low: ClassLowering, source: int, target: int) -> Axes:
    """The axes along which the last dim changes."""
    spec, before, after = low.spec(source), low.layout(source), low.layout(target)
    short, long = sorted((before[-1], after[-1]), key=len)
    if spec.storage not in ("rows", "vector") or spec.dtype.name not in _COPIED or before[:-1] != after[:-1]:
        raise PlanError(
            "[plan.reshards] layouts may change only along the last dim of rows and vectors in f32 or bf16; got "
            f"{spec.storage} {spec} from {show_layout(before)} to {show_layout(after)} at "
            f"{low.op.label!r}; give both sides one layout"
        )
    return long[len(short) :]


def _range(low: ClassLowering, tensor: int, device: int) -> tuple[int, int]:
    spec = low.spec(tensor)
    return low.shapes.on(device).range(spec, low.layout(tensor), len(spec.shape) - 1)
