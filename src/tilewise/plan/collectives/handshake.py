"""Signals, posts, waits and acknowledgements, of which all collectives consist.

A signal is a counter. A task posts a signal on another device (increases it) when it is complete,
and a task of that device can wait for the signal. The peers of a device are the other members of
its device group.

The functions of this package append their instructions to `low`, the lowering for one class of
devices. Several functions share these arguments:

    about       the tensor that a signal is about, which can be read or has been read: waits and posts name its slot,
                and `ir.validate` compares them
    increment   how often the peer posts; 0 or 1 by the call if the wait is for a credit (plan/rings.py)
    use         the call that the signal is about: this one, or one before it in a ring
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tilewise.core.mesh import DeviceMesh
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Emitter, Ref, Tiles
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
from tilewise.plan.classes import DeviceNumbers, PeerGroup
from tilewise.plan.shapes import LocalShapes

if TYPE_CHECKING:
    from tilewise.plan.lower import TemplateLowering

__all__ = [
    "SITE_SHIFT",
    "ExchangeLowering",
    "Signals",
    "emit_gather",
    "emit_reduce",
    "exchange",
    "gather_label",
    "group_of",
    "num_tiles",
    "outer_signals",
    "pending_of",
    "place_signals",
    "record_reduction",
    "reduce_label",
    "residual_of",
    "signals",
    "tree_kernel",
]

SITE_SHIFT = 24
_TREES = {"sum": "tree_add", "max": "tree_max", "min": "tree_min", "or": "tree_or"}


class ExchangeLowering(Emitter, Protocol):
    """The part of a lowering that exchanges use. `plan.lower.TemplateLowering` lowers the ops of a
    template; `plan.collectives.arrays` lowers programs that consist of one exchange.

    Attributes:
        is_whole_program: whether the exchange is a program of its own. Its sources are then complete
            before the program begins, and nothing overwrites them afterwards.
    """

    is_whole_program: bool
    mesh: DeviceMesh
    shapes: LocalShapes
    numbers: DeviceNumbers
    views: list[Ref]
    instructions: list[Draft]
    signal_ranges: list[int]
    ring_signal_ranges: list[int]
    collectives: list[Collective]


class Signals(NamedTuple):
    """The signals of one half of an exchange. Every member of a device group has `tiles` consecutive
    signals for each member that posts.

    Attributes:
        group: the device group, as one of its members sees it.
        first: the first signal.
        tiles: tasks of the loop, as many as on the member with most. 0 if no signals are needed:
            then nothing is posted or waited for.
        step: rows per task. In a loop of one task over all rows, one signal is for all tiles.
        use: which use of a tensor a signal is about, unless a call says otherwise: the call's
            position in its list, or a constant if devices of the group have different lists.
    """

    group: PeerGroup
    first: int
    tiles: int
    step: NumberLike
    use: NumberLike = POSITION

    @property
    def per_index(self) -> bool:
        """Whether every tile has its own signal."""
        return not is_single(self.step)

    def post(self, task: Draft, about: Ref, members: Iterable[NumberLike] | None = None) -> None:
        """Let a task post on members, by default on all peers, when it is complete."""
        group, me = self.group, self.group.me
        mine = Number(self.first, self.tiles * me.multiple, me.source, me.which)
        members = group.peer_members if members is None else members
        if not self.tiles:
            return
        task.notifies += [
            Notify(group.number, m, mine, self.per_index, about.slot, self.use) for m in members
        ]

    def wait(self, task: Draft, about: Ref, increment: NumberLike = 1, use: NumberLike | None = None) -> None:
        """Let a task wait for every peer."""
        if not self.tiles:
            return
        number, use = self.group.number, self.use if use is None else use
        task.waits += [
            Wait(
                Number(self.first, self.tiles, *p[2:]), self.per_index, increment, number, m, about.slot, use
            )
            for p, m in zip(self.group.peers, self.group.peer_members)
        ]

    def wait_for(self, task: Draft, about: Ref, members: Iterable[int]) -> None:
        """Let a task wait for some members."""
        if not self.tiles:
            return
        task.waits += [
            Wait(self.first + m * self.tiles, self.per_index, 1, self.group.number, m, about.slot, self.use)
            for m in members
        ]

    def offer(self, low: ExchangeLowering, about: Ref, members: Iterable[NumberLike] | None = None) -> None:
        """Append an instruction with an empty task per tile, which posts on members, by default on
        all peers, that the tile can be read.
        """
        if self.tiles:
            operand = Operand(about.slot, Mode.ROW)
            self.post(low.hold(about.extent, self.step, operand, f"{low.op.label}/offer"), about, members)

    def acknowledge(
        self, low: ExchangeLowering, about: Ref, increment: NumberLike = 1, use: NumberLike | None = None
    ) -> None:
        """Append an instruction with an empty task per tile. The task counts as a reader of the
        tile until all peers have posted that they have read it, so that the next writer of the tile
        waits for the peers too.
        """
        if not self.tiles:
            return
        operand = Operand(about.slot, Mode.ROW if self.per_index else Mode.WHOLE)
        task = low.hold(about.extent, self.step, operand, f"{low.op.label}/ack")
        self.wait(task, about, increment, use)


def signals(
    low: ExchangeLowering,
    group: PeerGroup,
    step: NumberLike,
    tiles: int,
    *,
    num_posting: int = 0,
    in_ring: bool = False,
) -> Signals:
    """Reserve signals. Their numbers are provisional: `place_signals` gives them their final numbers
    when it is known how many every class needs.

    Args:
        step, tiles: as in `Signals`.
        num_posting: how many members post; by default all.
        in_ring: whether the signals are those of a ring, which all variants of the template share.
            Their provisional numbers are below 0.
    """
    ranges = low.ring_signal_ranges if in_ring else low.signal_ranges
    number = -1 - len(ranges) if in_ring else len(ranges)
    ranges.append((num_posting or group.size) * tiles)
    # a template that several stages use is used once in a step
    use = Number(0) if low.shapes.settings.stage_axis in group.axes else POSITION
    return Signals(group, number << SITE_SHIFT, tiles, step, use)


def outer_signals(low: ExchangeLowering, group: PeerGroup, step: NumberLike, tiles: int) -> Signals:
    """Reserve signals that order an exchange and other tasks of the program: a source can be read,
    or has been read. If the exchange is the whole program, no such signals are needed.
    """
    return Signals(group, 0, 0, step) if low.is_whole_program else signals(low, group, step, tiles)


def tree_kernel(combine: str, parts: Ref) -> str:
    """The kernel that combines parts along a tree. Parts of a sum are in fp32, except for users'
    arrays.
    """
    return "tree_sum" if combine == "sum" and parts.dtype == "bf16" else _TREES[combine]


def reduce_label(label: str) -> str:
    """The label of the reduce-scatter half of a collective of the op with this label."""
    return f"{label}/reduce_scatter"


def gather_label(label: str) -> str:
    """The label of the all-gather half of a collective of the op with this label."""
    return f"{label}/all_gather"


def emit_gather(
    low: ExchangeLowering,
    over: Ref | Number,
    step: NumberLike,
    dtype: str,
    own: Sequence[Operand],
    of_members: Sequence[Operand],
) -> Draft:
    """Append copies of members' parts to this device's memory."""
    tiles: Tiles = {"dst": own, "src": of_members}
    label = gather_label(low.op.label)
    return low.emit("copy_pairs", over=over, step=step, dtype=dtype, tiles=tiles, priority=2, label=label)


def emit_reduce(
    low: ExchangeLowering,
    kernel: str,
    over: Ref,
    step: NumberLike,
    dtype: str,
    tiles: Tiles,
    ints: Mapping[str, int] | None = None,
) -> Draft:
    """Append a kernel that combines members' parts."""
    label = reduce_label(low.op.label)
    return low.emit(
        kernel, over=over, step=step, dtype=dtype, tiles=tiles, ints=ints, priority=2, label=label
    )


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
        constant = first[constant >> SITE_SHIFT] + (constant & ((1 << SITE_SHIFT) - 1))
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


def group_of(low: ExchangeLowering, pending: PendingReduction) -> PeerGroup:
    """The devices that complete a value together, in the order of its tree."""
    return low.numbers.group(pending.group, low.mesh.size(*pending.group) // len(pending.leaf_ranges))


def record_reduction(
    low: TemplateLowering,
    kind: str,
    pending: PendingReduction,
    src: Ref,
    dst: Ref,
    tensor: int,
    step: NumberLike,
) -> Collective:
    """The record of an exchange that completes a pending reduction, which is then done. `tensor` is
    the id of the complete value; -1 for a temporary.
    """
    low.completed.add(pending)
    number, partial = low.pending_reductions(pending.partial).index(pending), pending.partial
    tensors = -1, tensor
    return Collective(
        kind, low.op.id, pending.group, src.slot, dst.slot, tensors, step, partial=partial, number=number
    )


def pending_of(low: ExchangeLowering, record: Collective) -> PendingReduction:
    """The pending reduction that a record completes."""
    return low.pending_reductions(record.partial)[record.number]


def residual_of(low: ExchangeLowering, record: Collective, part: Operand) -> Tiles:
    """The operand that is added after a tree's root, if any: the part of the residual at the same
    place as `part` of the result, or the whole residual if it is a bias of one row.
    """
    if record.residual < 0:
        return {}
    if low.views[record.residual].extent == Number(1) != low.views[record.target].extent:
        return {"residual": Operand(record.residual, Mode.WHOLE)}
    return {"residual": part._replace(slot=record.residual)}


def num_tiles(low: ExchangeLowering, extent: Number, step: NumberLike) -> int:
    """Iterations of a loop, with symbols at their bounds."""
    bounds = low.shapes.bounds
    return 1 if is_single(step) else max(1, -(-extent.upper(bounds) // upper(step, bounds)))


def exchange(
    low: ExchangeLowering, record: Collective, expand: Callable[..., Collective], *producer: Draft
) -> None:
    """Expand a record to instructions, and note which instructions carry it out.

    Args:
        record: the exchange.
        expand: emits the instructions, and returns the record with what it added.
        producer: the instruction that writes the source, if this one posts that it is ready.
    """
    first = len(low.instructions)
    record = expand(low, record, *producer)
    low.collectives.append(record._replace(first=first, last=len(low.instructions)))
