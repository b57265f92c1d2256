"""A tile program as the lowering of an op of a graph.

`TileProgramFunction.lower` traces the program for the devices that a planner's class stands for, and
appends its instructions to the template that is lowered. They become part of the plan: layouts,
memory, order, the proof against deadlock, saved plans and remote hosts are those of any other op.

In a graph, memory is used again and again, by other ops too. So the program is enclosed by two
exchanges: no device touches the memory of another one before that has entered the op, and no device
leaves the op before all others have. The program itself is checked as one of its own (`check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.comm.primitives import interpreting
from tilewise.core.errors import PlanError
from tilewise.core.mesh import Axes
from tilewise.ir.layout import PendingReduction
from tilewise.ir.lowering import Draft, Ref
from tilewise.ir.program import Access, Collective, Number, NumberLike, Source
from tilewise.plan.collectives import SITE_SHIFT
from tilewise.plan.lower import TemplateLowering
from tilewise.tiles.emit import ClassEmitter, accesses_of
from tilewise.tiles.symbols import IntArray
from tilewise.tiles.trace import SignalRange, Statement, TensorForm, Tracer, View, arguments_of

if TYPE_CHECKING:
    from tilewise.tiles.program import TileProgramFunction

__all__ = ["NewSignals", "lower_program"]


@dataclass(frozen=True)
class NewSignals:
    """Signals that a program in a graph gets, in the place of `DeviceGroup.signals(count)`.

    Attributes:
        count: how many.
    """

    count: int


class _TemplateTarget:
    """A template of a plan: slots, numbers and signals are the template's."""

    def __init__(
        self, low: TemplateLowering, forms: dict[TensorForm, Ref], axes: Axes, devices: IntArray
    ) -> None:
        self._low, self._forms, self._devices = low, forms, devices
        self._axes, self._group = axes, low.numbers.group(axes).number
        self._site = len(low.signal_ranges) << SITE_SHIFT

    def slot(self, form: TensorForm) -> int:
        return self._forms[form].slot

    def ref(self, slot: int) -> Ref:
        return self._low.views[slot]

    def number(self, values: IntArray) -> NumberLike:
        table = dict(zip(self._devices.tolist(), values.tolist()))
        key = "tile program", *table.items()
        return self._low.numbers.place(key, lambda device: table.get(device, 0))

    def peers(self, owners: IntArray) -> tuple[int, IntArray]:
        mesh = self._low.mesh
        return self._group, np.array([mesh.coordinate(int(d), *self._axes) for d in owners], np.int64)

    def signal(self, number: NumberLike) -> NumberLike:
        if isinstance(number, Number):
            return number._replace(constant=number.constant + self._site)
        return number + self._site


def lower_program(
    program: TileProgramFunction,
    low: TemplateLowering,
    arguments: Sequence[object],
    axes: Axes,
    completes: PendingReduction | None,
) -> None:
    """Append the instructions of a program to a template (see `TileProgramFunction.lower`)."""
    size = low.mesh.size(*axes)
    forms: dict[TensorForm, Ref] = {}
    first, values = size, list[Any]()
    for argument in arguments:
        if isinstance(argument, Ref):
            form = _form(program.name, argument, forms)
            values.append(form)
        elif isinstance(argument, NewSignals):
            values.append(SignalRange(first, argument.count))
            first += argument.count
        else:
            values.append(argument)
    program.check_on(tuple((axis, low.mesh.size(axis)) for axis in axes), tuple(values))
    devices = np.array(low.shapes.devices_alike, np.int64)
    tracer = Tracer(program.name, low.mesh, devices.tolist(), SignalRange(0, size), axes)
    with interpreting(tracer):
        values = arguments_of(tracer, program.function, values)
        tracer.barrier()
        program.function(*values)
        tracer.barrier()
    tracer.finish()
    if tracer.others:
        raise PlanError(
            f"[tiles.{program.name}] in a graph, a program must not branch between devices that are planned alike; "
            f"got a branch between devices {tuple(tracer.devices.tolist())} and {tracer.others[0]}; use index "
            "arithmetic"
        )
    accesses = _accesses(tracer)
    if not accesses:
        raise PlanError(
            f"[tiles.{program.name}] in a graph, a program must call a kernel or copy; got none for tensors "
            f"{[list(form.shape) for form in forms]}; check the number of its tiles"
        )
    _hold_what_is_read(tracer, accesses)
    target = _TemplateTarget(low, forms, axes, devices)
    emitter = ClassEmitter(
        program.name, tracer, target, first, np.zeros((low.mesh.num_devices, first), np.int64)
    )
    begin = len(low.instructions)
    emitter.emit_body()
    low.signal_ranges.append(first)
    for instruction in emitter.instructions:
        plain = replace(instruction, waits=(), notifies=(), label=f"{low.op.label}/{instruction.label}")
        low.instructions.append(Draft(plain, list(instruction.waits), list(instruction.notifies)))
    low.scratch_bytes = max(low.scratch_bytes, emitter.scratch_bytes)
    uses = tuple((forms[form].slot, int(access)) for form, access in accesses.items())
    record = Collective("tile_program", low.op.id, axes, -1, -1, (-1, -1), uses=uses)
    if completes is not None:
        low.completed.add(completes)
        number = low.pending_reductions(completes.partial).index(completes)
        record = record._replace(partial=completes.partial, number=number)
    low.collectives.append(record._replace(first=begin, last=len(low.instructions)))


def _form(name: str, ref: Ref, forms: dict[TensorForm, Ref]) -> TensorForm:
    """The tensor of a view, whose rows must be known when planning."""
    if ref.extent.source != Source.NOTHING:
        raise PlanError(
            f"[tiles.{name}] a program needs tensors of fixed size; got {ref.extent} rows; fix the size of the "
            "graph's inputs"
        )
    same = next((form for form, other in forms.items() if other.slot == ref.slot), None)
    form = same or TensorForm(len(forms), (ref.extent.constant, ref.cols), ref.dtype, ref.packed)
    forms[form] = ref
    return form


def _accesses(tracer: Tracer) -> dict[TensorForm, Access]:
    """How the program uses each tensor, on any device."""
    used: dict[TensorForm, Access] = {}
    for statement in tracer.body.statements():
        for view, access in accesses_of(statement) if statement.name else ():
            before = used.get(view.form)
            # what is written first has no earlier value that is read
            used[view.form] = access if before is None else Access(before | (access & Access.OUT))
    return used


def _hold_what_is_read(tracer: Tracer, accesses: dict[TensorForm, Access]) -> None:
    """Enter and leave as a reader of what the program only reads, and as a writer of the rest."""
    ends: list[Statement] = [s for s in tracer.body.statements() if s.label.startswith("barrier/")]
    for statement in ends:
        views = [View(tracer, form, None, 0, form.rows) for form in accesses]
        statement.reads = [v for v in views if not accesses[v.form] & Access.OUT]
        statement.orders = [v for v in views if accesses[v.form] & Access.OUT]
