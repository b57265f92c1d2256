"""Lowers one template, or one run of root ops, for all classes of devices.

A variant is a template lowered for one use of it: a position among the microbatches, and layouts of
its tensors.

`lower_variant` is a pure function, whose arguments and result can be sent to another process. Its
result has its own numbering of the devices' numbers and device groups. `renumbered` replaces it by
the plan's numbering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewise.ir.graph import Graph, OpNode, Template
from tilewise.ir.layout import GraphLayout
from tilewise.ir.lowering import Ref
from tilewise.ir.program import (
    Instruction,
    LoweredTemplate,
    Notify,
    Number,
    NumberLike,
    Operand,
    Source,
    Wait,
)
from tilewise.ir.validate import Values, values_of
from tilewise.plan.classes import DeviceNumbers, NumberTable
from tilewise.plan.collectives import check_collective
from tilewise.plan.lower.template import TemplateLowering
from tilewise.plan.lower.written import written_slots
from tilewise.plan.memory import Buffer, place_buffers
from tilewise.plan.schedule import alias_roots
from tilewise.plan.shapes import LocalShapes

__all__ = ["LoweredVariant", "LoweringTask", "lower_variant", "renumbered"]


@dataclass(frozen=True)
class LoweringTask:
    """Everything that a variant depends on besides the devices' shapes.

    Attributes:
        name: the template's name.
        graph, layout: graph and layout of the template; for a run of root ops, of the whole graph.
        ops: the ops to lower.
        microbatch: the position among the microbatches.
        late_ops: ids of ops that run only after the last microbatch.
        returned: results and saved tensors of the template; None for root ops.
        arguments: arguments of the template.
        roots: for root ops, tensor -> the tensor whose memory it shares.
    """

    name: str
    graph: Graph
    layout: GraphLayout
    ops: tuple[OpNode, ...]
    microbatch: int
    late_ops: frozenset[int]
    returned: frozenset[int] | None
    arguments: frozenset[int]
    roots: Mapping[int, int]

    @classmethod
    def of_template(
        cls,
        template: Template,
        saved: Sequence[int],
        layout: GraphLayout,
        microbatch: int = 0,
        late_ops: frozenset[int] = frozenset(),
    ) -> LoweringTask:
        """The task of lowering a layer. `saved` are tensors that the layer's calls return besides
        its results.
        """
        graph, returned = template.graph, frozenset((*template.results, *saved))
        arguments = frozenset(template.arguments)
        return cls(template.key, graph, layout, graph.ops, microbatch, late_ops, returned, arguments, {})


@dataclass(frozen=True)
class LoweredVariant:
    """The result of a task.

    Attributes:
        templates: per class of devices, the instructions. They use the variant's own numbering of
            signals and numbers.
        views: per class, what every slot refers to, in the order of the slots.
        inner: tensors inside a template, with the positions of the ops that use them first and
            last.
        roots: tensor -> the tensor whose memory it shares.
        scratch_bytes: scratch memory of the largest call of a kernel.
        numbers: the numbers in which devices differ, and their device groups.
        temporaries: its own memory, placed from byte 0 on; keys are kind and number.
        written: per class, slots whose every row is written in each use.
        values: per class, what it reads and writes.
    """

    templates: tuple[LoweredTemplate, ...]
    views: tuple[tuple[Ref, ...], ...]
    inner: dict[int, tuple[int, int]]
    roots: Mapping[int, int]
    scratch_bytes: int
    numbers: NumberTable
    temporaries: tuple[Buffer, ...]
    written: tuple[frozenset[int], ...]
    values: tuple[Values, ...]


def lower_variant(
    task: LoweringTask, shapes: LocalShapes, cached: Mapping[object, Sequence[int]] | None = None
) -> LoweredVariant:
    """Lower a task for one device of each class.

    Args:
        shapes: local sizes on all devices.
        cached: values of numbers on every device that are known already, by meaning.

    Raises:
        InternalError: the instructions of an op violate a rule of values.
    """
    numbers = DeviceNumbers(shapes, cached)
    returned = task.returned
    roots = task.roots if returned is None else alias_roots(task.graph, task.ops, returned)
    lowerings = [
        TemplateLowering(
            task.name,
            task.graph,
            task.ops,
            task.layout,
            shapes.on(device),
            dict(roots),
            task.microbatch,
            numbers,
            task.late_ops,
        )
        for device in shapes.kinds
    ]
    templates = tuple(low.run() for low in lowerings)
    views = tuple(tuple(low.refs[s] for s in templates[0].slots) for low in lowerings)
    for template, of in zip(templates, views):
        for record in template.collectives:
            check_collective(record, task.layout, template.slots, of)
    inner = {} if returned is None else _live_intervals(lowerings[0], returned | task.arguments)
    return LoweredVariant(
        templates,
        views,
        inner,
        roots,
        max(low.scratch_bytes for low in lowerings),
        numbers.table(),
        _temporaries(task, templates, inner, shapes),
        tuple(written_slots(t, [view.extent for view in of]) for t, of in zip(templates, views)),
        tuple(values_of(t, task.layout) for t in templates),
    )


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
    for n, op in enumerate(low.ops):
        for t in (*op.inputs, *op.outputs):
            root = low.roots.get(t, t) if t is not None else None
            if root is not None and low.graph.tensors[root].kind == "result" and root not in outside:
                intervals[root] = (intervals.get(root, (n, n))[0], n)
    return intervals


def renumbered(template: LoweredTemplate, numbers: Sequence[int], groups: Sequence[int]) -> LoweredTemplate:
    """A template with the plan's numbering of numbers and device groups instead of the variant's."""
    if [*numbers] == [*range(len(numbers))] and [*groups] == [*range(len(groups))]:
        return template

    def number(n: NumberLike) -> NumberLike:
        return n if isinstance(n, int) or n.source != Source.DEVICE else n._replace(which=numbers[n.which])

    def group(t: int) -> int:
        return t if t < 0 else groups[t]

    def operand(o: Operand) -> Operand:
        return o._replace(
            group=group(o.group),
            member=number(o.member),
            div=number(o.div),
            part=number(o.part),
            parts=number(o.parts),
            offset=number(o.offset),
        )

    def wait(w: Wait) -> Wait:
        return w._replace(
            signal_base=number(w.signal_base),
            increment=number(w.increment),
            group=group(w.group),
            member=number(w.member),
            use=number(w.use),
        )

    def notify(n: Notify) -> Notify:
        return n._replace(
            group=group(n.group),
            member=number(n.member),
            signal_base=number(n.signal_base),
            use=number(n.use),
        )

    def instruction(i: Instruction) -> Instruction:
        extent = number(i.extent)
        assert isinstance(extent, Number)
        return replace(
            i,
            extent=extent,
            step=number(i.step),
            operands=tuple(map(operand, i.operands)),
            ints=tuple(map(number, i.ints)),
            waits=tuple(map(wait, i.waits)),
            notifies=tuple(map(notify, i.notifies)),
        )

    return replace(template, instructions=tuple(map(instruction, template.instructions)))
