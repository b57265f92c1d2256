"""Signals, posts, waits and acknowledgements: the parts of all collectives.

A *signal range* holds the signals of one half of an exchange on every member of a device group. It
has `tiles` consecutive signals per member, and only that member posts them. In a loop of several
tasks, tile i has its own signal (`per_index`). Several functions share these arguments:

    group       the device group that communicates, as one of its members sees it
    signals     where the signal range begins, as `ClassLowering.signals` returned it
    tiles       tasks of the loop (`num_tiles`)
    about       the tensor that the signal is about: waits and posts name its slot, and `ir.validate` compares them
    increment   how often the peer posts; 0 or 1 by the call if the wait is for a credit (plan/rings.py)
    use         the call that the signal is about: this one, or one before it in a ring
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

from tilewise.core.mesh import DeviceMesh
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Lowering, Ref
from tilewise.ir.program import (
    POSITION,
    Instruction,
    LoweredTemplate,
    Mode,
    Notify,
    Number,
    NumberLike,
    Operand,
    Reduction,
    Wait,
    is_single,
    upper,
)
from tilewise.plan.classes import DeviceGroup, DeviceNumbers
from tilewise.plan.shapes import LocalShapes

__all__ = [
    "TREES",
    "ClassLowering",
    "acknowledge",
    "await_peers",
    "gather_label",
    "group_of",
    "note_reduction",
    "num_tiles",
    "place_signals",
    "post_to_peers",
    "reduce_label",
    "residual_operand",
    "ring_signal_range",
    "signal_range",
]

_SITE_SHIFT = 24
TREES = {"sum": "tree_add", "max": "tree_max", "or": "tree_or"}  # the kernel that combines parts


class ClassLowering(Lowering, Protocol):
    """A lowering as collectives see it: that of a class of devices.

    Attributes:
        graph: what is lowered.
        mesh: all devices.
        shapes: local sizes, of any device.
        numbers: in which the devices of the class differ.
        instructions: what has been emitted.
        completed: what the current op has combined.
        reductions: where each shared value lies before and after.
        microbatch: which part of the batch is lowered.
    """

    graph: Graph
    mesh: DeviceMesh
    shapes: LocalShapes
    numbers: DeviceNumbers
    instructions: list[Draft]
    completed: set[PendingReduction]
    reductions: list[Reduction]
    microbatch: int

    def signals(self, count: int) -> int:
        """Reserve signals; numbered within their range until `place_signals` knows every class's need."""

    def ring_signals(self, count: int) -> int:
        """The same for a ring, whose signals all variants of the template share."""

    def ring(self, tensor: int, age: int = 0) -> Ref:
        """What has the shape of a tensor and lies in a ring: in this use's place, or that of the use `age` before."""

    def stack(self, tensor: int, rows: Number, cols: int, tile_rows: int) -> Ref:
        """What an owner keeps of a sum between microbatches, in f32."""


def reduce_label(label: str) -> str:
    """Label of the reduce-scatter half of a collective of the op with that label."""
    return f"{label}/reduce_scatter"


def gather_label(label: str) -> str:
    """Label of the all-gather half."""
    return f"{label}/all_gather"


def signal_range(number: int) -> int:
    """Where the signals of a range begin until `place_signals` knows every class's need; below 0 are those of rings."""
    return number << _SITE_SHIFT


def ring_signal_range(number: int) -> int:
    """The same of the signals of a ring."""
    return signal_range(-1 - number)


def place_signals(
    templates: Sequence[LoweredTemplate], first_signal: int, first_of_rings: int
) -> list[LoweredTemplate]:
    """Number the signals of one template alike in all classes, though shards of unequal size need unequal counts.

    Args:
        templates: of all classes.
        first_signal: where the template's own begin.
        first_of_rings: where those of its rings begin, which all its variants share.
    """
    sizes, rings = (
        [max(column) for column in zip(*ranges)]
        for ranges in ((t.signal_ranges for t in templates), (t.ring_signal_ranges for t in templates))
    )
    first = dict(enumerate(accumulate(sizes, initial=0)))
    before = first_of_rings - first_signal
    first |= {-1 - i: before + begin for i, begin in enumerate(accumulate(rings, initial=0))}

    def place(signal: NumberLike) -> NumberLike:
        constant = signal if isinstance(signal, int) else signal.constant
        constant = first[constant >> _SITE_SHIFT] + (constant & ((1 << _SITE_SHIFT) - 1))
        return constant if isinstance(signal, int) else Number(constant, *signal[1:])

    def placed(i: Instruction) -> Instruction:
        if not i.waits and not i.notifies:
            return i
        waits = tuple(Wait(place(w[0]), *w[1:]) for w in i.waits)
        notifies = tuple(Notify(n[0], n[1], place(n[2]), *n[3:]) for n in i.notifies)
        return replace(i, waits=waits, notifies=notifies)

    return [
        replace(
            t,
            instructions=tuple(placed(i) for i in t.instructions),
            signal_ranges=tuple(sizes),
            ring_signal_ranges=tuple(rings),
            first_signal=first_signal,
        )
        for t in templates
    ]


def group_of(low: ClassLowering, pending: PendingReduction) -> DeviceGroup:
    """The devices that complete a value together, in the order of its tree."""
    return low.numbers.group(pending.group, low.mesh.size(*pending.group) // len(pending.leaf_ranges))


def note_reduction(
    low: ClassLowering, op: OpNode, pending: PendingReduction, src: Ref, dst: Ref, residual: Ref | None = None
) -> None:
    """Say which slots hold a shared value before and after it is completed."""
    number = low.pending_reductions(op, pending.partial).index(pending)
    residual_slot = -1 if residual is None else residual.slot
    low.reductions.append(Reduction(op.id, pending.partial, number, src.slot, dst.slot, residual_slot))


def residual_operand(residual: Ref, out: Ref, part: Operand) -> Operand:
    """What is added behind a tree's root: the residual's part at the same place, or a bias, one row for all, whole. Of
    a single row both are the same part."""
    if residual.extent == Number(1) != out.extent:
        return Operand(residual.slot, Mode.WHOLE)
    return part._replace(slot=residual.slot)


def num_tiles(low: ClassLowering, extent: Number, step: NumberLike) -> int:
    """Iterations of a loop, symbols at their bounds."""
    bounds = low.shapes.bounds
    return 1 if is_single(step) else max(1, -(-extent.upper(bounds) // upper(step, bounds)))


def post_to_peers(
    task: Draft, group: DeviceGroup, signals: int, tiles: int, about: Ref, *, per_index: bool
) -> None:
    """Let a task tell every peer, tile by tile or once.

    Args:
        task: posts when it is complete.
        group: the devices that get the post; on each of them this device posts the signals of its own place.
        signals: where the signals begin.
        tiles: tasks of the loop.
        about: what can be read, or has been read.
        per_index: a signal per tile; else one for all.
    """
    mine = Number(signals, tiles * group.me.multiple, group.me.source, group.me.which)
    task.notifies += [Notify(group.number, m, mine, per_index, about.slot) for m in group.peer_members]


def await_peers(
    task: Draft,
    group: DeviceGroup,
    signals: int,
    tiles: int,
    about: Ref,
    *,
    per_index: bool,
    increment: NumberLike = 1,
    use: NumberLike = POSITION,
) -> None:
    """Let a task wait for every peer.

    Args:
        task: becomes ready after the posts.
        device group: who is waited for.
        signals: where the signals begin.
        tiles: tasks of the loop.
        about: what the posts speak of.
        per_index: a signal per tile; else one for all.
        increment: of each signal; a number of the call where only some uses wait.
        use: the call whose post is waited for.
    """
    task.waits += [
        Wait(Number(signals, tiles, *p[2:]), per_index, increment, group.number, m, about.slot, use)
        for p, m in zip(group.peers, group.peer_members)
    ]


def acknowledge(
    low: ClassLowering,
    op: OpNode,
    about: Ref,
    group: DeviceGroup,
    signals: int,
    tiles: int,
    step: NumberLike,
    *,
    increment: NumberLike = 1,
    use: NumberLike = POSITION,
) -> None:
    """Append an empty task that reads each tile until all peers have: so who writes there next waits for them too.

    Args:
        low: takes the instruction.
        op: for whom.
        about: what peers read.
        device group: who reads it.
        signals: where the range of the signals begins that say so.
        tiles: tasks of the loop.
        step: rows per task.
        increment: as in `await_peers`.
        use: likewise.
    """
    mode = Mode.WHOLE if is_single(step) else Mode.ROW
    task = low.hold(op, about.extent, step, Operand(about.slot, mode), f"{op.label}/ack")
    await_peers(
        task, group, signals, tiles, about, per_index=not is_single(step), increment=increment, use=use
    )
