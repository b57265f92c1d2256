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
    """

    number: int
    templates: tuple[LoweredTemplate, ...]
    views: tuple[tuple[Ref, ...], ...]
    inner: dict[int, tuple[int, int]]
    graph: Graph
    layout: GraphLayout
    roots: dict[int, int]
    scratch_bytes: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What the template's operands stand for, in all classes alike."""
        return self.templates[0].slots


@dataclass(frozen=True)
class Use:
    """One entry of a schedule with the variant that does it."""

    segment: Segment
    microbatch: int
    variant: int


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
            placed = place_signals([low.run() for low in lowerings])
            templates = tuple(replace(t, first_signal=num_signals) for t in placed)
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
            )
            num_signals += templates[0].num_signals
        uses.append(Use(segment, turn.microbatch, made[key].number))
    return Variants(tuple(made.values()), tuple(uses))


def _lives(low: TemplateLowering, outside: frozenset[int]) -> dict[int, tuple[int, int]]:
    """First and last op that uses each result which no caller sees."""
    lives: dict[int, tuple[int, int]] = {}
    for n, op in enumerate(low.ops):
        for t in (*op.inputs, *op.outputs):
            root = low.roots.get(t, t) if t is not None else None
            if root is not None and low.graph.tensors[root].kind == "result" and root not in outside:
                lives[root] = (lives.get(root, (n, n))[0], n)
    return lives
