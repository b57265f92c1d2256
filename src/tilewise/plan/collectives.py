"""Collectives as tile tasks: reduce-scatter, all-gather, their product all-reduce, gather and broadcast.

Devices read each other's tiles in place. For every tile of a team of n devices:

    producer     writes its partial tile, then raises `ready` on every peer
    reduce       waits for `ready` of every peer; combines the n partials of ITS part of the rows along the fixed tree,
                 adds the residual, rounds once; then raises `done` and `ack partial` on every peer
    gather       waits for `done` of every peer; copies their parts; then raises `ack result` on them
    ack tasks    hold the partial and the result as readers until all peers have read them, so that reusing the memory
                 waits for peers as for any other reader

A gather brings shards together on one device under the same signals; a broadcast (`broadcast_instructions`) copies what
the host has written on one device of a team to the others, and needs none: no device writes what others read.

Elements read per device: (n-1)/n of the tile in reduce and as much in gather, 2(n-1)/n in all. Signals count up and
are never reset; one device raises each, and its tasks do so in the order of submission (native/programs/run/expand.cc).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tilewise.core.errors import PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.ir.graph import OpNode
from tilewise.ir.layout import Record, show_axes, show_layout
from tilewise.ir.lowering import Lowering, Ref, Tiles
from tilewise.ir.program import Instruction, LoweredTemplate, Mode, Notify, Number, Operand, Wait, upper
from tilewise.plan.emission import make_instruction
from tilewise.plan.shapes import LocalShapes

__all__ = [
    "DeviceLowering",
    "all_reduce",
    "all_reduce_in_place",
    "broadcast_instructions",
    "gather",
    "gather_label",
    "place_signals",
    "reduce_label",
    "signal_site",
    "team_of",
]

_SITE_SHIFT = 24
_TREE = {"sum": "tree_add", "max": "tree_max", "or": "tree_or"}


def reduce_label(label: str) -> str:
    """Label of the reduce-scatter half of a collective of the op with that label."""
    return f"{label}/reduce_scatter"


def broadcast_instructions(tensors: Sequence[tuple[str, Ref, int]]) -> tuple[Instruction, ...]:
    """Copies of whole tensors from other devices: (name, view with its slot, source device)."""
    refs = {ref.slot: ref for _, ref, _ in tensors}
    return tuple(
        make_instruction(
            "copy_pairs",
            maker="the broadcast",
            label=f"broadcast:{name}",
            extent=ref.extent,
            step=ref.tile_rows,
            dtype=ref.dtype,
            tiles={
                "dst": [Operand(ref.slot, Mode.ROW)],
                "src": [Operand(ref.slot, Mode.ROW, team=0, member=source)],
            },
            ref_of=refs.__getitem__,
        )
        for name, ref, source in tensors
    )


def gather_label(label: str) -> str:
    """Label of the all-gather half."""
    return f"{label}/all_gather"


def signal_site(number: int) -> int:
    """Where the signals of a site begin until `place_signals` knows every device's need."""
    return number << _SITE_SHIFT


def place_signals(templates: Sequence[LoweredTemplate]) -> list[LoweredTemplate]:
    """Number the signals of one template alike on all devices, though shards of unequal size need unequal counts."""
    sizes: list[int] = [max(column) for column in zip(*(t.signal_sites for t in templates))]
    first = [sum(sizes[:i]) for i in range(len(sizes))]

    def number(signal: int) -> int:
        return first[signal >> _SITE_SHIFT] + (signal & ((1 << _SITE_SHIFT) - 1))

    for template in templates:
        for i in template.instructions:
            i.waits = [w._replace(signal_base=number(upper(w.signal_base))) for w in i.waits]
            i.notifies = [n._replace(signal_base=number(upper(n.signal_base))) for n in i.notifies]
    return [replace(t, signal_sites=tuple(sizes)) for t in templates]


class DeviceLowering(Lowering, Protocol):
    """A lowering as collectives see it: that of one device among others.

    Attributes:
        mesh: all devices.
        device: this one.
        shapes: local sizes, of any device.
        instructions: what has been emitted.
        completed: what the current op has combined.
    """

    mesh: DeviceMesh
    device: int
    shapes: LocalShapes
    instructions: list[Instruction]
    completed: set[Record]

    def signals(self, count: int) -> int:
        """Reserve signals; numbered within their site until `place_signals` knows every device's need."""

    def hold(self, op: OpNode, over: Number, step: int, operand: Operand, label: str) -> Instruction:
        """Append an empty task per tile that reads the tile: it orders and acknowledges."""


def team_of(low: DeviceLowering, record: Record) -> list[int]:
    """The devices that complete a value together (this one among them), in the order of its tree."""
    devices = low.mesh.team(low.device, *record.team)
    size = len(devices) // len(record.held)
    first = devices.index(low.device) // size * size
    return devices[first : first + size]


def all_reduce(
    low: DeviceLowering,
    op: OpNode,
    source: int | Ref,
    target: int | Ref,
    residual: int | Ref | None,
    record: Record,
    *,
    step: int | None = None,
    producer: Instruction | None = None,
) -> None:
    """Combine `source` over a record's team into `target` (plus a residual), tile by tile.

    `producer` is the instruction that writes `source`, by default the last one emitted; it loops over the same
    tiles.
    """
    if record.arrives_in_shards:
        raise PlanError(
            f"[plan.collectives] a sum arrives whole on every device that shares it; got {record.partial!r} of "
            f"{op.label!r} asked for as {show_layout(record.arrives[0])} over {show_axes(record.team)}; drop the hint"
        )
    low.completed.add(record)
    src, dst = low.tensor(source), low.tensor(target)
    if src.packed:
        src, dst = low.flat(src), low.flat(dst)
    beside = None if residual is None else low.tensor(residual)
    step = low.row_step(src) if step is None else step
    devices = team_of(low, record)
    producer = producer or low.instructions[-1]
    done = _reduce_scatter(low, op, producer, src, dst, beside, record.combine, devices, step)
    _all_gather(low, op, dst, done, devices, step)


def all_reduce_in_place(low: DeviceLowering, op: OpNode, ref: Ref, record: Record) -> None:
    """Sum a gradient over a team, in place: every device reduces its part into itself and fetches the others'."""
    flat = low.flat(ref)
    producer = low.instructions[-1]
    step = upper(producer.step) if ref.packed else 0
    devices = team_of(low, record)
    done = _reduce_scatter(low, op, producer, flat, flat, None, record.combine, devices, step)
    _all_gather(low, op, flat, done, devices, step)


def _tiles(low: DeviceLowering, extent: Number, step: int) -> int:
    bounds = tuple(s.max for s in low.shapes.symbols)
    return 1 if step <= 0 else max(1, -(-extent.upper(bounds) // step))


def _reduce_scatter(
    low: DeviceLowering,
    op: OpNode,
    producer: Instruction,
    src: Ref,
    dst: Ref,
    residual: Ref | None,
    kind: str,
    devices: list[int],
    step: int,
) -> int:
    """Every device combines its part; returns the signals that say so."""
    n, me, tiles = len(devices), devices.index(low.device), _tiles(low, src.extent, step)
    peers = [q for q in range(n) if q != me]
    ready = low.signals(n * tiles)
    done = low.signals(n * tiles)
    per_index = step > 0
    producer.notifies += [Notify(0, devices[q], ready + me * tiles, per_index) for q in peers]

    def part(ref: Ref, peer: int = -1) -> Operand:
        return Operand(ref.slot, Mode.ROWPART, team=min(peer, 0), member=max(peer, 0), part=me, parts=n)

    in_place = src.slot == dst.slot
    views: Tiles = {
        "out": part(dst),
        "x": [part(src, -1 if q == me else devices[q]) for q in range(n)],
        **({"residual": part(residual)} if residual is not None else {}),
    }
    reduce = low.emit(
        _TREE[kind],
        op,
        over=src,
        step=step,
        dtype=dst.dtype,
        tiles=views,
        priority=2,
        label=reduce_label(op.label),
    )
    reduce.waits += [Wait(ready + q * tiles, per_index, 1) for q in peers]
    reduce.notifies += [Notify(0, devices[q], done + me * tiles, per_index) for q in peers]
    if not in_place:  # there, `done` of a peer says that it has read the part the gather will overwrite
        ack = low.signals(n * tiles)
        reduce.notifies += [Notify(0, devices[q], ack + me * tiles, per_index) for q in peers]
        _acknowledge(low, op, src, ack, peers, step)
    return done


def _all_gather(low: DeviceLowering, op: OpNode, dst: Ref, done: int, devices: list[int], step: int) -> None:
    """Every device copies the parts that its peers have combined, as `done` says."""
    n, me, tiles = len(devices), devices.index(low.device), _tiles(low, dst.extent, step)
    peers = [q for q in range(n) if q != me]
    ack, per_index = low.signals(n * tiles), step > 0
    views: Tiles = {
        "dst": [Operand(dst.slot, Mode.ROWPART, part=q, parts=n) for q in peers],
        "src": [Operand(dst.slot, Mode.ROWPART, team=0, member=devices[q], part=q, parts=n) for q in peers],
    }
    gather = low.emit(
        "copy_pairs",
        op,
        over=dst,
        step=step,
        dtype=dst.dtype,
        tiles=views,
        priority=2,
        label=gather_label(op.label),
    )
    gather.waits += [Wait(done + q * tiles, per_index, 1) for q in peers]
    gather.notifies += [Notify(0, devices[q], ack + me * tiles, per_index) for q in peers]
    _acknowledge(low, op, dst, ack, peers, step)


def gather(low: DeviceLowering, op: OpNode, source: int, target: int) -> None:
    """Bring the column shards of `source` together in `target` on the first device of the axes that shard it."""
    src, dst = low.tensor(source), low.tensor(target)
    devices, step = low.mesh.team(low.device, *low.layout(source)[-1]), low.row_step(src)
    n, me, tiles = len(devices), devices.index(low.device), _tiles(low, src.extent, step)
    ready, ack = low.signals(n * tiles), low.signals(tiles)
    held = Operand(src.slot, Mode.ROW)
    if me > 0:
        offer = low.hold(op, src.extent, step, held, f"{op.label}/offer")
        offer.notifies.append(Notify(0, devices[0], ready + me * tiles, True))
        task = low.hold(op, src.extent, step, held, f"{op.label}/ack")
        task.waits.append(Wait(ack, True, 1))
        return
    spec, layout = low.spec(source), low.layout(source)
    ranges = [low.shapes.on(device).range(spec, layout, len(spec.shape) - 1) for device in devices]
    pairs: Tiles = {
        "dst": [Operand(dst.slot, Mode.ROWCOLS, part=begin, parts=end - begin) for begin, end in ranges],
        "src": [held, *(held._replace(team=0, member=device) for device in devices[1:])],
    }
    copy = low.emit(
        "copy_pairs",
        op,
        over=src,
        step=step,
        dtype=dst.dtype,
        tiles=pairs,
        priority=2,
        label=gather_label(op.label),
    )
    copy.waits += [Wait(ready + q * tiles, True, 1) for q in range(1, n)]
    copy.notifies += [Notify(0, device, ack, True) for device in devices[1:]]


def _acknowledge(low: DeviceLowering, op: OpNode, ref: Ref, ack: int, peers: list[int], step: int) -> None:
    """An empty task that reads the tile as long as peers do."""
    mode = Mode.ROW if step > 0 else Mode.WHOLE
    task = low.hold(op, ref.extent, step, Operand(ref.slot, mode), f"{op.label}/ack")
    tiles = _tiles(low, ref.extent, step)
    task.waits += [Wait(ack + q * tiles, step > 0, 1) for q in peers]
