"""Signals, posts, waits and acknowledgements, of which all collectives consist.

A signal is a counter. A task posts a signal on another device (increases it) when it is complete,
and a task of that device can wait for the signal. The peers of a device are the other members of
its device group.

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
from tilewise.core.tree import Interval
from tilewise.ir.graph import Graph
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Lowering, Ref
from tilewise.ir.program import (
    POSITION,
    Collective,
    Instruction,
    LoweredTemplate,
    Mode,
    Notify,
    Number,
    NumberLike,
    Operand,
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
    "num_tiles",
    "pending_of",
    "place_signals",
    "post_to_peers",
    "record_reduction",
    "reduce_label",
    "residual_operand",
    "ring_signal_range",
    "signal_range",
]

_SITE_SHIFT = 24
TREES = {"sum": "tree_add", "max": "tree_max", "or": "tree_or"}  # the kernel that combines parts


class ClassLowering(Lowering, Protocol):
    """The interface of a lowering, for one class of devices, that collectives use.

    Attributes:
        graph: the graph that is lowered.
        mesh: all devices.
        shapes: local sizes on any device.
        numbers: the numbers in which devices of the class differ.
        instructions: those emitted so far.
        views: the tensor of each slot.
        completed: values that the current op has combined.
        microbatch: the part of the batch that is lowered.
    """

    graph: Graph
    mesh: DeviceMesh
    shapes: LocalShapes
    numbers: DeviceNumbers
    instructions: list[Draft]
    views: list[Ref]
    completed: set[PendingReduction]
    microbatch: int

    def exchange(self, record: Collective, producer: Draft | None = None) -> None:
        """Expand a record to instructions, and note which instructions carry it out.

        Args:
            record: the exchange.
            producer: the instruction that writes its source, if this one posts that it is ready.
        """

    def signals(self, count: int) -> int:
        """Reserve signals, and return the provisional number of the first. `place_signals` gives
        them their final numbers when it is known how many every class needs.
        """

    def ring_signals(self, count: int) -> int:
        """Reserve signals of a ring. All variants of the template share them."""

    def ring(self, tensor: int, age: int = 0) -> Ref:
        """A view with the shape of a tensor in a ring (places that uses of the template take in
        turn): in the place of this use, or of the use `age` uses before.
        """

    def stack(self, tensor: int, rows: Number, cols: int, tile_rows: int) -> Ref:
        """The stack of a sum that an owner keeps between microbatches, in f32."""


def reduce_label(label: str) -> str:
    """The label of the reduce-scatter half of a collective of the op with this label."""
    return f"{label}/reduce_scatter"


def gather_label(label: str) -> str:
    """The label of the all-gather half of a collective of the op with this label."""
    return f"{label}/all_gather"


def signal_range(number: int) -> int:
    """The provisional first number of range number `number`. `place_signals` replaces it when it is
    known how many signals every class needs. (Provisional numbers of rings' signals are below 0.)
    """
    return number << _SITE_SHIFT


def ring_signal_range(number: int) -> int:
    """The provisional first number of range number `number` among the ranges of rings."""
    return signal_range(-1 - number)


def place_signals(
    templates: Sequence[LoweredTemplate], first_signal: int, first_of_rings: int
) -> list[LoweredTemplate]:
    """Replace the provisional numbers of a template's signals by final ones, which are equal in all
    classes. A range has as many signals as the class that needs the most, because classes with
    unequal shards need unequal numbers of signals.

    Args:
        templates: the template of each class.
        first_signal: the first signal of the template.
        first_of_rings: the first signal of its rings, which all its variants share.
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


def record_reduction(
    low: ClassLowering,
    kind: str,
    pending: PendingReduction,
    src: Ref,
    dst: Ref,
    tensor: int,
    step: NumberLike,
    residual: Ref | None = None,
    parts: Sequence[Interval] = (),
) -> Collective:
    """The record of an exchange that completes a pending reduction, which is then done. `tensor` is
    the id of the complete value; -1 for a temporary.
    """
    low.completed.add(pending)
    number = low.pending_reductions(pending.partial).index(pending)
    residual_slot = -1 if residual is None else residual.slot
    return Collective(
        kind,
        low.op.id,
        pending.group,
        src.slot,
        dst.slot,
        (-1, tensor),
        step,
        (*parts,),
        pending.partial,
        number,
        residual_slot,
    )


def pending_of(low: ClassLowering, record: Collective) -> PendingReduction:
    """The pending reduction that a record completes."""
    return low.pending_reductions(record.partial)[record.number]


def residual_operand(residual: Ref, out: Ref, part: Operand) -> Operand:
    """The operand that is added after a tree's root: the part of the residual at the same place, or
    the whole residual if it is a bias of one row.
    """
    if residual.extent == Number(1) != out.extent:
        return Operand(residual.slot, Mode.WHOLE)
    return part._replace(slot=residual.slot)


def num_tiles(low: ClassLowering, extent: Number, step: NumberLike) -> int:
    """Iterations of a loop, with symbols at their bounds."""
    bounds = low.shapes.bounds
    return 1 if is_single(step) else max(1, -(-extent.upper(bounds) // upper(step, bounds)))


def post_to_peers(
    task: Draft, group: DeviceGroup, signals: int, tiles: int, about: Ref, *, per_index: bool
) -> None:
    """Let a task post a signal on every peer, for each tile or once.

    Args:
        task: posts when it is complete.
        group: the devices that get the post. On each of them this device posts the signals of its
            own place.
        signals: the first signal of the range.
        tiles: tasks of the loop.
        about: the tensor that can be read, or has been read.
        per_index: whether there is a signal per tile; otherwise one signal is for all tiles.
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
        task: starts after the posts.
        group: the devices that it waits for.
        signals: the first signal of the range.
        tiles: tasks of the loop.
        about: the tensor that the posts are about.
        per_index: whether there is a signal per tile; otherwise one signal is for all tiles.
        increment: increment of each signal; a number of the call if only some uses wait.
        use: the call whose posts the task waits for.
    """
    task.waits += [
        Wait(Number(signals, tiles, *p[2:]), per_index, increment, group.number, m, about.slot, use)
        for p, m in zip(group.peers, group.peer_members)
    ]


def acknowledge(
    low: ClassLowering,
    about: Ref,
    group: DeviceGroup,
    signals: int,
    tiles: int,
    step: NumberLike,
    *,
    increment: NumberLike = 1,
    use: NumberLike = POSITION,
) -> None:
    """Append an instruction with an empty task per tile. The task counts as a reader of the tile
    until all peers have read it, so that the next writer of the tile waits for the peers too.

    Args:
        low: receives the instruction.
        about: the tensor that peers read.
        group: the device group whose members read it.
        signals: the first signal of the range in which they post.
        tiles: tasks of the loop.
        step: rows per task.
        increment: as in `await_peers`.
        use: as in `await_peers`.
    """
    mode = Mode.WHOLE if is_single(step) else Mode.ROW
    task = low.hold(about.extent, step, Operand(about.slot, mode), f"{low.op.label}/ack")
    await_peers(
        task, group, signals, tiles, about, per_index=not is_single(step), increment=increment, use=use
    )
