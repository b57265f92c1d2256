"""Collectives on users' arrays: tile programs that consist of one exchange.

An array is flat: rows of one element each. It has the same place in every device's memory. The
records and the instructions are those of the planner. Since nothing else runs in the program, the
sources are complete before it begins and nothing overwrites them: only the two halves of an
all-reduce need signals. All devices are in one class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.core.tree import Interval
from tilewise.ir.graph import OpNode
from tilewise.ir.layout import K_SPLITS, GraphLayout, PendingReduction, TensorLayout
from tilewise.ir.lowering import Draft, Ref
from tilewise.ir.program import (
    COPIES,
    Call,
    Collective,
    DeviceClass,
    LoweredTemplate,
    Number,
    NumberLike,
    Operand,
    Slot,
    TensorEntry,
    TileProgram,
)
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.collectives.all_to_all import expand_all_to_all
from tilewise.plan.collectives.checks import check_collective
from tilewise.plan.collectives.handshake import exchange, place_signals
from tilewise.plan.collectives.rows import (
    expand_all_gather_batch,
    expand_all_reduce,
    expand_reduce_scatter_rows,
)
from tilewise.plan.emission import make_hold, make_instruction
from tilewise.plan.shapes import LocalShapes, PlanSettings, round_up

__all__ = ["FlatArray", "array_program", "most_signals"]

_MOST_TASKS = 16  # of an instruction
_MOST_SIGNALS = 1024
_TASK_BYTES = 512 << 10
_MOST_TILES = 64  # of an array, by which tasks are ordered
_WHOLE: TensorLayout = ((), ())
_EXPANSIONS: Mapping[str, Callable[..., Collective]] = {
    "all_gather_batch": expand_all_gather_batch,
    "all_reduce": expand_all_reduce,
    "all_to_all": expand_all_to_all,
    "reduce_scatter_rows": expand_reduce_scatter_rows,
}


class FlatArray(NamedTuple):
    """An array in every device's memory: its elements, their dtype, and its first byte."""

    elements: int
    dtype: str
    offset: int


def array_program(
    mesh: DeviceMesh,
    name: str,
    kind: str,
    axes: Axes,
    source: FlatArray,
    target: FlatArray,
    *,
    combine: str = "",
    parts: Sequence[Interval] = (),
    first_signal: int = 0,
    is_whole_program: bool = True,
) -> TileProgram:
    """A program that consists of one exchange, which every device group along some axes carries out.

    Args:
        mesh: the devices.
        name: name of the program; its instructions' labels begin with it.
        kind: kind of the record.
        axes: axes of the device group.
        source, target: the arrays before and after; equal if the exchange is in place.
        combine: how partial values are combined: `sum`, `max` or `min`.
        parts: as in the record.
        first_signal: the first of the signals that it may use: `most_signals` of the mesh's devices.
        is_whole_program: False to let the devices signal also that sources can be read and have
            been read, as in a program with other instructions.

    Raises:
        InternalError: the record contradicts the arrays.
    """
    arrays = [source] if source == target else [source, target]
    step = _rows_per_task(mesh.size(*axes), target if kind == "reduce_scatter_rows" else source)
    pending = () if kind in COPIES else (_pending(mesh, axes, combine, kind),)
    low = _ArrayLowering(mesh, name, arrays, step, pending, is_whole_program)
    last = len(arrays) - 1
    record = Collective(kind, 0, axes, 0, last, (-1 if pending else 0, last), step, tuple(parts))
    if pending:
        record = record._replace(partial=pending[0].partial)
    exchange(low, record, _EXPANSIONS[kind])
    slots = tuple(Slot("tensor", i) for i in range(len(arrays)))
    layout = GraphLayout(
        mesh,
        (),
        (_rows_of(axes, kind, ("all_gather_batch", "all_to_all")), _rows_of(axes, kind, ("all_to_all",))),
        pending_reductions={(0, p.partial): (p,) for p in pending},
    )
    check_collective(low.collectives[0], layout, slots, low.views)
    instructions = tuple(draft.freeze() for draft in low.instructions)
    template = LoweredTemplate(
        name, instructions, slots, (), tuple(low.signal_ranges), (), tuple(low.collectives)
    )
    (template,) = place_signals([template], first_signal, first_signal)
    calls = {"run": (Call(0, tuple(range(len(arrays)))),)}
    of = DeviceClass((template,), _entries(arrays, low.views, step, record), {}, calls)
    return TileProgram((of,), low.numbers.bindings(dict.fromkeys(range(mesh.num_devices), 0)))


def most_signals(devices: int) -> int:
    """The most signals of a program of one exchange: one per member of a device group and task."""
    return min(devices * _MOST_TASKS, _MOST_SIGNALS)


def _rows_per_task(members: int, array: FlatArray) -> int:
    """Rows per task, so that tasks are few, and members' parts of a task's rows begin at cache lines."""
    item = dtype_named(array.dtype).itemsize
    tasks = min(max(array.elements * item // _TASK_BYTES, 1), most_signals(members) // members)
    rows = -(-array.elements // tasks)
    return min(round_up(rows, members * 128 // item), array.elements)


def _rows_of(axes: Axes, kind: str, dividing: Sequence[str]) -> TensorLayout:
    """The layout of an array: in some kinds, devices have rows of their own; else all have the same."""
    return (axes, ()) if kind in dividing else _WHOLE


def _pending(mesh: DeviceMesh, axes: Axes, combine: str, kind: str) -> PendingReduction:
    """The reduction of one partial value per device."""
    members = mesh.size(*axes)
    leaves = tuple((i, i + 1) for i in range(members))
    arrives = _rows_of(axes, kind, ("reduce_scatter_rows",))
    return PendingReduction(0, "array", combine, (0,), K_SPLITS, members, axes, (leaves,), (arrives,))


def _entries(
    arrays: Sequence[FlatArray], views: Sequence[Ref], step: int, record: Collective
) -> tuple[TensorEntry, ...]:
    """Entries with tiles that most tasks do not share."""
    entries, handle = [], 0
    for number, (array, view) in enumerate(zip(arrays, views)):
        tile = step
        if number == record.target:
            tile = gcd(tile, *(end for part in record.parts for end in part))
        tile = max(tile, -(-array.elements // _MOST_TILES))
        entries.append(
            TensorEntry(("symmetric", number), array.offset, view.extent, 1, 1, array.dtype, tile, handle)
        )
        handle += -(-array.elements // tile)
    return tuple(entries)


class _ArrayLowering:
    """Collects the instructions of one exchange. See `plan.collectives.handshake.ExchangeLowering`."""

    def __init__(
        self,
        mesh: DeviceMesh,
        name: str,
        arrays: Sequence[FlatArray],
        step: int,
        pending: tuple[PendingReduction, ...],
        is_whole_program: bool,
    ) -> None:
        self.mesh, self.is_whole_program = mesh, is_whole_program
        self.op = OpNode(0, name, (0,), (1,), label=name)
        self.shapes = LocalShapes(mesh, PlanSettings(), 1, ())
        self.numbers = DeviceNumbers(self.shapes)
        self.views = [Ref(slot, Number(a.elements), 1, a.dtype, step) for slot, a in enumerate(arrays)]
        self.instructions: list[Draft] = []
        self.signal_ranges: list[int] = []
        self.ring_signal_ranges: list[int] = []
        self.collectives: list[Collective] = []
        self._pending = pending

    def pending_reductions(self, partial: str) -> tuple[PendingReduction, ...]:
        return self._pending

    def emit(
        self, kernel: str, *, over: Ref | Number, step: NumberLike | None = None, **arguments: Any
    ) -> Draft:
        draft = make_instruction(
            kernel,
            maker=self.op.label,
            extent=over.extent if isinstance(over, Ref) else over,
            step=0 if step is None else step,
            ref_of=self.views.__getitem__,
            **arguments,
        )
        self.instructions.append(draft)
        return draft

    def hold(self, over: Number, step: NumberLike, operand: Operand, label: str) -> Draft:
        draft = make_hold(self.op.label, label, over, step, operand, self.views.__getitem__)
        self.instructions.append(draft)
        return draft
