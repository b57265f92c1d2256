"""Lowers every distinct template for all classes of devices: once per position among the microbatches
that differs.

A variant is a template, or a run of root ops, lowered for one use of it: a position among the
microbatches, and layouts of its tensors.

`lower_variant` is a pure function, whose arguments and result can be sent to another process. Its
result has its own numbering of the devices' numbers and device groups. `_renumbered` replaces it by
the plan's numbering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.lowering import Ref
from tilewise.ir.op import import_ops, modules_of_ops
from tilewise.ir.program import (
    Instruction,
    LoweredTemplate,
    Notify,
    Number,
    NumberLike,
    Operand,
    Slot,
    Source,
    Wait,
)
from tilewise.ir.validate import Values, values_of
from tilewise.plan.classes import DeviceNumbers, NumberTable
from tilewise.plan.collectives import check_collective, place_signals
from tilewise.plan.lower.template import LoweringTask, TemplateLowering
from tilewise.plan.lower.uses import written_slots
from tilewise.plan.memory import Buffer, place_buffers
from tilewise.plan.rings import credits_of_uses, numbers_of_moves
from tilewise.plan.schedule import Scheduled, Segment, alias_roots
from tilewise.plan.shapes import LocalShapes
from tilewise.processes.workers import ENOUGH, WorkerPool

__all__ = ["Use", "Variant", "Variants", "lower"]

_Record = TypeVar("_Record", Operand, Wait, Notify)


@dataclass(frozen=True)
class LoweredVariant:
    """The result of a task.

    Attributes:
        templates: per class of devices, the instructions. They use the variant's own numbering of
            signals and numbers.
        views: per class, what every slot refers to, in the order of the slots.
        scratch_bytes: scratch memory of the largest call of a kernel.
        numbers: the numbers in which devices differ, and their device groups.
        temporaries: its own memory, placed from byte 0 on; keys are kind and number.
        written: per class, slots whose every row is written in each use.
        values: per class, what it reads and writes.
    """

    templates: tuple[LoweredTemplate, ...]
    views: tuple[tuple[Ref, ...], ...]
    scratch_bytes: int
    numbers: NumberTable
    temporaries: tuple[Buffer, ...]
    written: tuple[frozenset[int], ...]
    values: tuple[Values, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What the template's operands refer to, equal in all classes."""
        return self.templates[0].slots


@dataclass(frozen=True)
class Variant(LoweredVariant):
    """One lowered template. Its templates use the plan's numbering.

    Attributes:
        number: its index among all variants; programs refer to it.
        rings: number of the variant whose rings it shares: the first of the same template.
        graph, layout: the template's, or the whole graph's for a run of root ops.
    """

    number: int
    rings: int
    graph: Graph
    layout: GraphLayout


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
        uses: per stage of the pipeline, the uses of a step, in order.
        numbers: the numbers in which devices of a class differ.
    """

    variants: tuple[Variant, ...]
    uses: tuple[tuple[Use, ...], ...]
    numbers: NumberTable

    def uses_alone(self, phase: str) -> tuple[tuple[Use, ...], ...]:
        """Per stage, the uses of one phase, with ring numbers for a list of these uses only.

        All uses of a ring are of one phase, so each use has the same place in its ring as in a
        step.
        """
        alone = ([use for use in uses if use.segment.phase == phase] for uses in self.uses)
        return tuple(_with_credits(self.variants, uses) for uses in alone)

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
    """Lower every variant that the schedules use, for one device of each class that uses it.

    Args:
        pool: worker processes that lower templates, if there are many.
    """
    graph, layout, sums = scheduled.graph, scheduled.layout, scheduled.sums
    numbers = DeviceNumbers(scheduled.shapes)
    tasks: dict[tuple[object, ...], LoweringTask] = {}
    stages: dict[tuple[object, ...], set[int]] = {}  # that use each task
    wanted: list[tuple[int, Segment, int, tuple[object, ...], tuple[object, ...]]] = []
    for stage, turn in ((s, turn) for s, turns in enumerate(scheduled.schedules) for turn in turns):
        segment = scheduled.segments[turn.segment]
        call, name = segment.call, segment.name(graph)
        if call is not None:
            template = graph.templates[call.attrs["template"]]
            ops, inner_layout, late = template.graph.ops, layout.calls[call.id], sums.calls[call.id]
            identity: tuple[object, ...] = (name, id(inner_layout), call.attrs["saved"], late.late_ops)
        else:
            ops, late = segment.ops, sums
            identity = (name,)
        is_ack = turn.kind == "acknowledged"
        varies = is_ack or (
            turn.microbatch > 0 and any(o in late.complete_last for op in ops for o in op.outputs)
        )
        key = (*identity, turn.microbatch if varies else 0)
        wanted.append((stage, segment, turn.microbatch, identity, key))
        if key in tasks:
            stages[key].add(stage)
            continue
        stages[key] = {stage}
        fields = turn.microbatch, late.late_ops
        if call is not None:
            counts.lowered += 1
            returned = frozenset((*template.results, *call.attrs["saved"]))
            arguments, inside = frozenset(template.arguments), template.graph
            tasks[key] = LoweringTask(
                template.key, inside, inner_layout, ops, *fields, returned, arguments, {}
            )
        else:
            roots = scheduled.tensors.roots
            tasks[key] = LoweringTask(
                name, graph, layout, ops, *fields, None, frozenset(), roots, is_acknowledgement=is_ack
            )
    if len(scheduled.schedules) > 1:
        tasks = {key: replace(task, stages=frozenset(stages[key])) for key, task in tasks.items()}
    lowered = _lower_all(list(tasks.values()), scheduled.shapes, numbers, pool)
    made = _numbered(tasks, lowered, numbers, {key: identity for _, _, _, identity, key in wanted})
    uses: list[list[Use]] = [[] for _ in scheduled.schedules]
    for stage, segment, microbatch, _, key in wanted:
        uses[stage].append(Use(segment, microbatch, made[key].number))
    variants = tuple(made.values())
    with_credits = tuple(_with_credits(variants, of_stage) for of_stage in uses)
    return Variants(variants, with_credits, numbers.table())


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


def lower_variant(
    task: LoweringTask, shapes: LocalShapes, cached: Mapping[object, Sequence[int]] | None = None
) -> LoweredVariant:
    """Lower a task for one device of each class. Classes of stages that do not use it get a template
    without instructions.

    Args:
        shapes: local sizes on all devices.
        cached: values of numbers on every device that are known already, by meaning.

    Raises:
        InternalError: the instructions of an op violate a rule of values.
    """
    numbers = DeviceNumbers(shapes, cached)
    returned = task.returned
    roots = task.roots if returned is None else alias_roots(task.graph, task.ops, returned)
    on = [shapes.on(device) for device in shapes.kinds]
    lowerings = [TemplateLowering(task, own, numbers, dict(roots)) for own in on if own.stage in task.stages]
    templates = tuple(low.run() for low in lowerings)
    views = tuple(tuple(low.refs[s] for s in templates[0].slots) for low in lowerings)
    for template, of in zip(templates, views):
        for record in template.collectives:
            check_collective(record, task.layout, template.slots, of)
    inner = {} if returned is None else _live_intervals(lowerings[0], returned | task.arguments)
    temporaries = _temporaries(task, templates, inner, shapes)
    if len(lowerings) < len(on):
        used = [own.stage in task.stages for own in on]
        templates, views = _with_absent(used, templates, views)
    return LoweredVariant(
        templates,
        views,
        max(low.scratch_bytes for low in lowerings),
        numbers.table(),
        temporaries,
        tuple(written_slots(t, [view.extent for view in of]) for t, of in zip(templates, views)),
        tuple(values_of(t, task.layout) for t in templates),
    )


def _with_absent(
    used: Sequence[bool], templates: Sequence[LoweredTemplate], views: Sequence[tuple[Ref, ...]]
) -> tuple[tuple[LoweredTemplate, ...], tuple[tuple[Ref, ...], ...]]:
    """Templates and views of all classes, from those of the classes that use them."""
    absent = replace(templates[0], instructions=(), temps=(), collectives=())
    nothing = tuple(view._replace(extent=Number(0)) for view in views[0])
    present = iter(zip(templates, views))
    both = [next(present) if is_used else (absent, nothing) for is_used in used]
    return tuple(template for template, _ in both), tuple(of for _, of in both)


def _temporaries(
    task: LoweringTask,
    templates: Sequence[LoweredTemplate],
    inner: Mapping[int, tuple[int, int]],
    shapes: LocalShapes,
) -> tuple[Buffer, ...]:
    """Buffers of inner results and temporaries, with the ops during which each is live."""
    made = [
        Buffer(
            ("inner", t),
            shapes.bytes_max(task.graph.spec(t), task.layout.compute[t]),
            "temporaries",
            first,
            last,
        )
        for t, (first, last) in inner.items()
    ]
    for i, temps in enumerate(zip(*(t.temps for t in templates))):
        op, size = temps[0].op, max(t.max_bytes for t in temps)
        made.append(Buffer(("temp", i), size, "temporaries", op, op))
    return tuple(place_buffers(made, 0)[0])


def _live_intervals(low: TemplateLowering, outside: frozenset[int]) -> dict[int, tuple[int, int]]:
    """For each result that no caller sees, the first and the last op that uses it."""
    intervals: dict[int, tuple[int, int]] = {}
    for n, op in enumerate(low.task.ops):
        for t in (*op.inputs, *op.outputs):
            root = low.roots.get(t, t) if t is not None else None
            if root is not None and low.graph.tensors[root].kind == "result" and root not in outside:
                intervals[root] = (intervals.get(root, (n, n))[0], n)
    return intervals


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
        own = [_renumbered(t, *places) for t in result.templates]
        identity, first_of_rings = identities[key], num_signals
        if identity in rings:
            first_of_rings = rings[identity][1]
        else:
            rings[identity] = number, num_signals
            num_signals += sum(max(ranges) for ranges in zip(*(t.ring_signal_ranges for t in own)))
        templates = tuple(place_signals(own, num_signals, first_of_rings))
        fields = {**vars(result), "templates": templates}
        made[key] = Variant(
            **fields, number=number, rings=rings[identity][0], graph=task.graph, layout=task.layout
        )
        num_signals += templates[0].num_signals
    return made


def _renumbered(template: LoweredTemplate, numbers: Sequence[int], groups: Sequence[int]) -> LoweredTemplate:
    """A template with the plan's numbering of numbers and device groups instead of the variant's."""
    if [*numbers] == [*range(len(numbers))] and [*groups] == [*range(len(groups))]:
        return template

    def number(n: NumberLike) -> NumberLike:
        return n if isinstance(n, int) or n.source != Source.DEVICE else n._replace(which=numbers[n.which])

    def record(r: _Record) -> _Record:
        changed: dict[str, Any] = {f: number(v) for f, v in zip(r._fields, r) if isinstance(v, Number)}
        return r._replace(group=r.group if r.group < 0 else groups[r.group], **changed)

    def instruction(i: Instruction) -> Instruction:
        extent = number(i.extent)
        assert isinstance(extent, Number)
        return replace(
            i,
            extent=extent,
            step=number(i.step),
            operands=tuple(map(record, i.operands)),
            ints=tuple(map(number, i.ints)),
            waits=tuple(map(record, i.waits)),
            notifies=tuple(map(record, i.notifies)),
            first=number(i.first),
        )

    return replace(template, instructions=tuple(map(instruction, template.instructions)))


def _with_credits(variants: Sequence[Variant], uses: Sequence[Use]) -> tuple[Use, ...]:
    """Uses of rings, and of moves between stages, with their numbers."""
    positions: dict[int, list[int]] = {}
    moves: dict[int, list[int]] = {}  # by segment
    for position, use in enumerate(uses):
        if use.segment.is_move:
            moves.setdefault(use.segment.index, []).append(position)
        elif variants[use.variant].templates[0].ring_signal_ranges:
            positions.setdefault(variants[use.variant].rings, []).append(position)
    result = list(uses)
    for of in moves.values():
        microbatches = [uses[position].microbatch for position in of]
        for position, numbers in zip(of, numbers_of_moves(microbatches)):
            result[position] = replace(uses[position], numbers=numbers)
    for of in positions.values():
        for number, (position, numbers) in enumerate(zip(of, credits_of_uses(of))):
            result[position] = replace(uses[position], ring_use=number, numbers=numbers)
    return tuple(result)
