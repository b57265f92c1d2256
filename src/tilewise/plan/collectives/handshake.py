"""What all collectives are made of: signals of a site, raises to peers, waits for them, acknowledgements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tilewise.core.mesh import DeviceMesh
from tilewise.ir.graph import OpNode
from tilewise.ir.layout import Record
from tilewise.ir.lowering import Draft, Lowering, Ref
from tilewise.ir.program import (
    Completion,
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
from tilewise.plan.classes import DeviceNumbers, Team
from tilewise.plan.shapes import LocalShapes

__all__ = [
    "ClassLowering",
    "acknowledge",
    "await_peers",
    "gather_label",
    "note_completion",
    "num_tiles",
    "place_signals",
    "raise_on_peers",
    "reduce_label",
    "signal_site",
    "team_of",
]

_SITE_SHIFT = 24


class ClassLowering(Lowering, Protocol):
    """A lowering as collectives see it: that of a class of devices.

    Attributes:
        mesh: all devices.
        shapes: local sizes, of any device.
        numbers: in which the devices of the class differ.
        instructions: what has been emitted.
        completed: what the current op has combined.
        completions: where each shared value lies before and after.
    """

    mesh: DeviceMesh
    shapes: LocalShapes
    numbers: DeviceNumbers
    instructions: list[Draft]
    completed: set[Record]
    completions: list[Completion]

    def signals(self, count: int) -> int:
        """Reserve signals; numbered within their site until `place_signals` knows every class's need."""


def reduce_label(label: str) -> str:
    """Label of the reduce-scatter half of a collective of the op with that label."""
    return f"{label}/reduce_scatter"


def gather_label(label: str) -> str:
    """Label of the all-gather half."""
    return f"{label}/all_gather"


def signal_site(number: int) -> int:
    """Where the signals of a site begin until `place_signals` knows every class's need."""
    return number << _SITE_SHIFT


def place_signals(templates: Sequence[LoweredTemplate]) -> list[LoweredTemplate]:
    """Number the signals of one template alike in all classes, though shards of unequal size need unequal counts."""
    sizes: list[int] = [max(column) for column in zip(*(t.signal_sites for t in templates))]
    first = [sum(sizes[:i]) for i in range(len(sizes))]

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
        replace(t, instructions=tuple(placed(i) for i in t.instructions), signal_sites=tuple(sizes))
        for t in templates
    ]


def team_of(low: ClassLowering, record: Record) -> Team:
    """The devices that complete a value together, in the order of its tree."""
    return low.numbers.team(record.team, low.mesh.size(*record.team) // len(record.held))


def note_completion(
    low: ClassLowering, op: OpNode, record: Record, src: Ref, dst: Ref, residual: Ref | None = None
) -> None:
    """Say which slots hold a shared value before and after it is completed."""
    number = low.records(op, record.partial).index(record)
    beside = -1 if residual is None else residual.slot
    low.completions.append(Completion(op.id, record.partial, number, src.slot, dst.slot, beside))


def num_tiles(low: ClassLowering, extent: Number, step: NumberLike) -> int:
    """Iterations of a loop, symbols at their bounds."""
    bounds = low.shapes.bounds
    return 1 if is_single(step) else max(1, -(-extent.upper(bounds) // upper(step, bounds)))


def raise_on_peers(task: Draft, team: Team, site: int, tiles: int, about: Ref, *, per_index: bool) -> None:
    """Tell every peer; a device's own signals at a site are those of its place."""
    mine = Number(site, tiles * team.me.multiple, team.me.source, team.me.which)
    task.notifies += [Notify(team.number, m, mine, per_index, about.slot) for m in team.peer_members]


def await_peers(task: Draft, team: Team, site: int, tiles: int, about: Ref, *, per_index: bool) -> None:
    """Wait for every peer."""
    task.waits += [
        Wait(Number(site, tiles, *p[2:]), per_index, 1, team.number, m, about.slot)
        for p, m in zip(team.peers, team.peer_members)
    ]


def acknowledge(
    low: ClassLowering, op: OpNode, about: Ref, team: Team, site: int, tiles: int, step: NumberLike
) -> None:
    """An empty task that reads the tile as long as peers do."""
    mode = Mode.WHOLE if is_single(step) else Mode.ROW
    task = low.hold(op, about.extent, step, Operand(about.slot, mode), f"{op.label}/ack")
    await_peers(task, team, site, tiles, about, per_index=not is_single(step))
