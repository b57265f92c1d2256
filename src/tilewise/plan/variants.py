"""Lowering every distinct template once per class of devices and microbatch position that makes a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.lowering import Ref
from tilewise.ir.program import LoweredTemplate, Slot
from tilewise.ir.schedule import Schedule
from tilewise.plan.accumulation import BatchSums
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.collectives import place_signals
from tilewise.plan.lower import TemplateLowering, alias_roots
from tilewise.plan.rings import credits_of_uses
from tilewise.plan.segments import Segment
from tilewise.plan.shapes import LocalShapes

__all__ = ["Use", "Variant", "Variants", "lower_variants"]


@dataclass(frozen=True)
class Variant:
    """One template as it was lowered.

    Attributes:
        number: its position among all variants; programs refer to it.
        templates: instructions per class of devices.
        views: per class, what every slot stands for, in the order of the slots.
        inner: tensors of the template's graph that live inside it, with the positions of the ops that use them first
            and last.
        graph, layout: the template's, or the whole graph's for a run of root ops.
        roots: tensor -> tensor whose memory it shares.
        rings: number of the variant whose rings it uses too: the first of the same template.
    """

    number: int
    templates: tuple[LoweredTemplate, ...]
    views: tuple[tuple[Ref, ...], ...]
    inner: dict[int, tuple[int, int]]
    graph: Graph
    layout: GraphLayout
    roots: dict[int, int]
    scratch_bytes: int
    rings: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What the template's operands stand for, in all classes alike."""
        return self.templates[0].slots


@dataclass(frozen=True)
class Use:
    """One entry of a schedule with the variant that does it.

    Attributes:
        ring_use: how many uses of its rings come before it in a step.
        numbers: that the call's instructions ask for (`plan.rings`).
    """

    segment: Segment
    microbatch: int
    variant: int
    ring_use: int = 0
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Variants:
    """All variants of a plan and the order in which a step uses them."""

    variants: tuple[Variant, ...]
    uses: tuple[Use, ...]

    @property
    def num_signals(self) -> int:
        """Signals of all templates together."""
        last = self.variants[-1] if self.variants else None
        return 0 if last is None else last.templates[0].first_signal + last.templates[0].num_signals

    @property
    def scratch_bytes(self) -> int:
        """Working memory of a worker: what the largest call of a kernel needs, on any device."""
        return max((v.scratch_bytes for v in self.variants), default=0)


def lower_variants(
    graph: Graph,
    layout: GraphLayout,
    shapes: LocalShapes,
    segments: Sequence[Segment],
    schedule: Schedule,
    sums: BatchSums,
    roots: dict[int, int],
    numbers: DeviceNumbers,
) -> Variants:
    """Walk the schedule and lower what has not been lowered yet.

    Args:
        shapes: of all devices; one of each class is asked (`LocalShapes.kinds`).
        sums: what waits for the last microbatch.
        roots: of the root graph's tensors.
        numbers: in which the devices of a class differ.
    """
    made: dict[tuple[object, ...], Variant] = {}
    uses = []
    num_signals = 0
    rings: dict[
        tuple[object, ...], tuple[int, int]
    ] = {}  # the first variant of a template, and its rings' signals
    for turn in schedule:
        segment = segments[turn.segment]
        call, name = segment.call, segment.name(graph)
        if call is not None:
            template = graph.templates[call.attrs["template"]]
            inside, inner_layout = template.graph, layout.calls[call.id]
            late = sums.calls[call.id]
            identity: tuple[object, ...] = (name, id(inner_layout), call.attrs["saved"], late.late_ops)
        else:
            inside, inner_layout, late = graph, layout, sums
            identity = (name,)
        ops = inside.ops if call is not None else segment.ops
        varies = any(o in late.complete_last for op in ops for o in op.outputs)
        key = (*identity, turn.microbatch if varies else 0)
        if key not in made:
            counts.lowered += call is not None
            keep = frozenset((*template.results, *call.attrs["saved"])) if call is not None else frozenset()
            own_roots = roots if call is None else alias_roots(inside, ops, keep)
            lowerings = [
                TemplateLowering(
                    name,
                    inside,
                    ops,
                    inner_layout,
                    shapes.on(d),
                    own_roots,
                    turn.microbatch,
                    numbers,
                    late.late_ops,
                )
                for d in shapes.kinds
            ]
            lowered = [low.run() for low in lowerings]
            first_of_rings = num_signals
            if identity in rings:
                first_of_rings = rings[identity][1]
            else:
                rings[identity] = len(made), num_signals
                num_signals += sum(max(sites) for sites in zip(*(t.ring_sites for t in lowered)))
            templates = tuple(place_signals(lowered, num_signals, first_of_rings))
            outside = keep | frozenset(template.arguments) if call is not None else None
            made[key] = Variant(
                len(made),
                templates,
                tuple(tuple(low.refs[s] for s in templates[0].slots) for low in lowerings),
                {} if outside is None else _lives(lowerings[0], outside),
                inside,
                inner_layout,
                own_roots,
                max(low.scratch_bytes for low in lowerings),
                rings[identity][0],
            )
            num_signals += templates[0].num_signals
        uses.append(Use(segment, turn.microbatch, made[key].number))
    variants = tuple(made.values())
    return Variants(variants, _with_credits(variants, uses))


def _with_credits(variants: Sequence[Variant], uses: Sequence[Use]) -> tuple[Use, ...]:
    """Uses of rings with their numbers."""
    positions: dict[int, list[int]] = {}
    for position, use in enumerate(uses):
        if variants[use.variant].templates[0].ring_sites:
            positions.setdefault(variants[use.variant].rings, []).append(position)
    result = list(uses)
    for of in positions.values():
        for number, (position, numbers) in enumerate(zip(of, credits_of_uses(of))):
            result[position] = replace(uses[position], ring_use=number, numbers=numbers)
    return tuple(result)


def _lives(low: TemplateLowering, outside: frozenset[int]) -> dict[int, tuple[int, int]]:
    """First and last op that uses each result which no caller sees."""
    lives: dict[int, tuple[int, int]] = {}
    for n, op in enumerate(low.ops):
        for t in (*op.inputs, *op.outputs):
            root = low.roots.get(t, t) if t is not None else None
            if root is not None and low.graph.tensors[root].kind == "result" and root not in outside:
                lives[root] = (lives.get(root, (n, n))[0], n)
    return lives
