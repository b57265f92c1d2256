"""Lowers every distinct template, once per class of devices and per position among the microbatches
that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.lowering import Ref
from tilewise.ir.op import import_ops, modules_of_ops
from tilewise.ir.program import LoweredTemplate, Slot
from tilewise.ir.validate import Values
from tilewise.plan.classes import DeviceNumbers, NumberTable
from tilewise.plan.collectives import place_signals
from tilewise.plan.lower.variant import LoweredVariant, LoweringTask, lower_variant, renumbered
from tilewise.plan.memory import Buffer
from tilewise.plan.rings import credits_of_uses
from tilewise.plan.schedule import Scheduled, Segment
from tilewise.plan.shapes import LocalShapes
from tilewise.processes.workers import ENOUGH, WorkerPool

__all__ = ["Use", "Variant", "Variants", "lower"]


@dataclass(frozen=True)
class Variant:
    """One lowered template.

    Attributes:
        number: its index among all variants; programs refer to it.
        templates: instructions per class of devices.
        views: per class, what every slot refers to, in the order of the slots.
        inner: tensors inside the template, with the positions of the ops that use them first and
            last.
        graph, layout: the template's, or the whole graph's for a run of root ops.
        roots: tensor -> tensor whose memory it shares.
        rings: number of the variant whose rings it shares: the first of the same template.
        temporaries, written, values: as in `LoweredVariant`.
    """

    number: int
    templates: tuple[LoweredTemplate, ...]
    views: tuple[tuple[Ref, ...], ...]
    inner: dict[int, tuple[int, int]]
    graph: Graph
    layout: GraphLayout
    roots: Mapping[int, int]
    scratch_bytes: int
    rings: int
    temporaries: tuple[Buffer, ...]
    written: tuple[frozenset[int], ...]
    values: tuple[Values, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What the template's operands refer to, equal in all classes."""
        return self.templates[0].slots


@dataclass(frozen=True)
class Use:
    """One entry of a schedule with its variant.

    Attributes:
        ring_use: how many uses of its rings precede it in a step.
        numbers: numbers that the call's instructions refer to (`plan.rings`).
    """

    segment: Segment
    microbatch: int
    variant: int
    ring_use: int = 0
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Variants:
    """All variants of a plan and the order in which a step uses them.

    Attributes:
        variants: the lowered templates.
        uses: the uses of a step, in order.
        numbers: the numbers in which devices of a class differ.
    """

    variants: tuple[Variant, ...]
    uses: tuple[Use, ...]
    numbers: NumberTable

    def uses_alone(self, phase: str) -> tuple[Use, ...]:
        """The uses of one phase, with ring numbers for a list of these uses only.

        All uses of a ring are of one phase, so each use has the same place in its ring as in a
        step.
        """
        return _with_credits(self.variants, [use for use in self.uses if use.segment.phase == phase])

    @property
    def num_signals(self) -> int:
        """The number of signals of all templates."""
        last = self.variants[-1] if self.variants else None
        return 0 if last is None else last.templates[0].first_signal + last.templates[0].num_signals

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of a worker: that of the largest call of a kernel, on any device."""
        return max((v.scratch_bytes for v in self.variants), default=0)


def lower(scheduled: Scheduled, pool: WorkerPool | None = None) -> Variants:
    """Lower every variant that a schedule uses, for one device of each class.

    Args:
        pool: worker processes that lower templates, if there are many.
    """
    graph, layout, sums = scheduled.graph, scheduled.layout, scheduled.sums
    numbers = DeviceNumbers(scheduled.shapes)
    tasks: dict[tuple[object, ...], LoweringTask] = {}
    wanted: list[tuple[Segment, int, tuple[object, ...], tuple[object, ...]]] = []
    for turn in scheduled.order:
        segment = scheduled.segments[turn.segment]
        call, name = segment.call, segment.name(graph)
        if call is not None:
            template = graph.templates[call.attrs["template"]]
            ops, inner_layout, late = template.graph.ops, layout.calls[call.id], sums.calls[call.id]
            identity: tuple[object, ...] = (name, id(inner_layout), call.attrs["saved"], late.late_ops)
        else:
            ops, late = segment.ops, sums
            identity = (name,)
        varies = turn.microbatch > 0 and any(o in late.complete_last for op in ops for o in op.outputs)
        key = (*identity, turn.microbatch if varies else 0)
        wanted.append((segment, turn.microbatch, identity, key))
        if key in tasks:
            continue
        if call is not None:
            counts.lowered += 1
            tasks[key] = LoweringTask.of_template(
                template, call.attrs["saved"], inner_layout, turn.microbatch, late.late_ops
            )
        else:
            tasks[key] = LoweringTask(
                name,
                graph,
                layout,
                ops,
                turn.microbatch,
                late.late_ops,
                None,
                frozenset(),
                scheduled.tensors.roots,
            )
    lowered = _lower_all(list(tasks.values()), scheduled.shapes, numbers, pool)
    made = _numbered(tasks, lowered, numbers, {key: identity for _, _, identity, key in wanted})
    uses = [Use(segment, microbatch, made[key].number) for segment, microbatch, _, key in wanted]
    variants = tuple(made.values())
    return Variants(variants, _with_credits(variants, uses), numbers.table())


def _lower_all(
    tasks: Sequence[LoweringTask], shapes: LocalShapes, numbers: DeviceNumbers, pool: WorkerPool | None
) -> list[LoweredVariant]:
    """The result of every task, in order. Workers lower templates if there are many."""
    apart = [task for task in tasks if task.returned is not None]
    modules = modules_of_ops({op.op for task in apart for op in task.ops})
    if pool is None or modules is None or len(apart) < ENOUGH:
        return [lower_variant(task, shapes, numbers.values_by_key) for task in tasks]
    plain = replace(shapes)  # without its caches, which are large
    theirs = pool.map(_lower_in_worker, [(modules, task, plain) for task in apart])
    here = iter(
        [lower_variant(task, shapes, numbers.values_by_key) for task in tasks if task.returned is None]
    )
    return [next(here) if task.returned is None else next(theirs) for task in tasks]


def _lower_in_worker(modules: Sequence[str], task: LoweringTask, shapes: LocalShapes) -> LoweredVariant:
    import_ops(modules)
    return lower_variant(task, shapes)


def _numbered(
    tasks: Mapping[tuple[object, ...], LoweringTask],
    lowered: Sequence[LoweredVariant],
    numbers: DeviceNumbers,
    identities: Mapping[tuple[object, ...], tuple[object, ...]],
) -> dict[tuple[object, ...], Variant]:
    """Variants by key, with the plan's signals and device numbers. `identities` has the template of each key. All
    variants of a template share its rings."""
    made = {}
    rings: dict[object, tuple[int, int]] = {}  # the first variant of a template, and its rings' signals
    num_signals = 0
    for number, (result, (key, task)) in enumerate(zip(lowered, tasks.items())):
        places = numbers.take(result.numbers)
        own = [renumbered(t, *places) for t in result.templates]
        identity, first_of_rings = identities[key], num_signals
        if identity in rings:
            first_of_rings = rings[identity][1]
        else:
            rings[identity] = number, num_signals
            num_signals += sum(max(ranges) for ranges in zip(*(t.ring_signal_ranges for t in own)))
        templates = tuple(place_signals(own, num_signals, first_of_rings))
        made[key] = Variant(
            number,
            templates,
            result.views,
            result.inner,
            task.graph,
            task.layout,
            result.roots,
            result.scratch_bytes,
            rings[identity][0],
            result.temporaries,
            result.written,
            result.values,
        )
        num_signals += templates[0].num_signals
    return made


def _with_credits(variants: Sequence[Variant], uses: Sequence[Use]) -> tuple[Use, ...]:
    """Uses of rings with their numbers."""
    positions: dict[int, list[int]] = {}
    for position, use in enumerate(uses):
        if variants[use.variant].templates[0].ring_signal_ranges:
            positions.setdefault(variants[use.variant].rings, []).append(position)
    result = list(uses)
    for of in positions.values():
        for number, (position, numbers) in enumerate(zip(of, credits_of_uses(of))):
            result[position] = replace(uses[position], ring_use=number, numbers=numbers)
    return tuple(result)
