"""Changes of layout as tile tasks: columns of row tiles are gathered from peers on every device, or sliced at home.

Devices read each other's tiles in place, as in `plan.collectives`: `offer` holds a part and raises `ready` on every
peer, the copy waits for `ready` of all and raises `ack`, and an empty task holds the part until all peers have read it.
A slice moves nothing between devices. Elements read per device: what its result has and its own part has not.
"""

from __future__ import annotations

from tilewise.core.errors import PlanError
from tilewise.core.mesh import Axes
from tilewise.ir.graph import OpNode
from tilewise.ir.layout import show_layout
from tilewise.ir.lowering import Tiles
from tilewise.ir.program import Mode, Notify, Operand, Wait
from tilewise.plan.collectives import DeviceLowering, gather_label

__all__ = ["all_gather_columns", "slice_columns"]

_COPIED = ("f32", "bf16")


def slice_columns(low: DeviceLowering, op: OpNode, source: int, target: int) -> None:
    """Copy this device's columns of every row tile.

    Raises:
        PlanError: more than columns of rows would change.
    """
    _columns(low, op, source, target)
    src, dst = low.tensor(source), low.tensor(target)
    begin, end = _range(low, target, low.device)
    first = _range(low, source, low.device)[0]
    part = Operand(src.slot, Mode.ROWCOLS, part=begin - first, parts=end - begin)
    tiles: Tiles = {"dst": [Operand(dst.slot, Mode.ROW)], "src": [part]}
    low.emit("copy_pairs", op, over=dst, step=low.row_step(dst), dtype=dst.dtype, tiles=tiles)


def all_gather_columns(low: DeviceLowering, op: OpNode, source: int, target: int) -> None:
    """Copy the columns of all devices that share a row tile.

    Raises:
        PlanError: more than columns of rows would change.
    """
    axes = _columns(low, op, source, target)
    src, dst = low.tensor(source), low.tensor(target)
    devices, step = low.mesh.team(low.device, *axes), low.row_step(src)
    bounds = tuple(s.max for s in low.shapes.symbols)
    n, me, tiles = len(devices), devices.index(low.device), max(1, -(-src.extent.upper(bounds) // step))
    peers = [q for q in range(n) if q != me]
    ready, ack = low.signals(n * tiles), low.signals(n * tiles)
    held, first = Operand(src.slot, Mode.ROW), _range(low, target, low.device)[0]
    offer = low.hold(op, src.extent, step, held, f"{op.label}/offer")
    offer.notifies += [Notify(0, devices[q], ready + me * tiles, True) for q in peers]
    ranges = [_range(low, source, device) for device in devices]
    pairs: Tiles = {
        "dst": [Operand(dst.slot, Mode.ROWCOLS, part=b - first, parts=e - b) for b, e in ranges],
        "src": [held if q == me else held._replace(team=0, member=d) for q, d in enumerate(devices)],
    }
    label = gather_label(op.label)
    copy = low.emit(
        "copy_pairs", op, over=src, step=step, dtype=dst.dtype, tiles=pairs, priority=2, label=label
    )
    copy.waits += [Wait(ready + q * tiles, True, 1) for q in peers]
    copy.notifies += [Notify(0, devices[q], ack + me * tiles, True) for q in peers]
    done = low.hold(op, src.extent, step, held, f"{op.label}/ack")
    done.waits += [Wait(ack + q * tiles, True, 1) for q in peers]


def _columns(low: DeviceLowering, op: OpNode, source: int, target: int) -> Axes:
    """The axes along which the last dim changes."""
    spec, before, after = low.spec(source), low.layout(source), low.layout(target)
    short, long = sorted((before[-1], after[-1]), key=len)
    if spec.storage != "rows" or spec.dtype.name not in _COPIED or before[:-1] != after[:-1]:
        raise PlanError(
            f"[plan.reshards] layouts change along the last dim of rows in f32 or bf16; got {spec.storage} {spec} from "
            f"{show_layout(before)} to {show_layout(after)} at {op.label!r}; lay out both sides alike"
        )
    return long[len(short) :]


def _range(low: DeviceLowering, tensor: int, device: int) -> tuple[int, int]:
    spec = low.spec(tensor)
    return low.shapes.on(device).range(spec, low.layout(tensor), len(spec.shape) - 1)
