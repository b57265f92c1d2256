"""From traced statements to a tile program, as the planner makes them: classes of devices, templates
of instructions, and numbers in which devices of one class differ.

Devices that took the same branches become a class. A statement becomes one instruction; in a tile
loop, an instruction with the loop's iterations as its tasks. Expressions of ranks become numbers of
the device. If a loop's tiles are not adjacent, or its statements need each other's earlier
iterations, the loop is unrolled: each statement of each iteration becomes an instruction.

A signal counts from the beginning of a program. Natively it counts on from run to run, so each wait
adds to the value that its device expects, and at the end of a program every device expects what it
was sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewise.core.errors import InternalError, PlanError, ShapeError
from tilewise.core.mesh import DeviceMesh
from tilewise.ir.graph import PANEL_ROWS
from tilewise.ir.lowering import Draft, Ref
from tilewise.ir.program import (
    Access,
    Call,
    DeviceBinding,
    DeviceClass,
    Instruction,
    LoweredTemplate,
    Mode,
    Notify,
    Number,
    NumberLike,
    Operand,
    Slot,
    TensorEntry,
    TileProgram,
    Wait,
    constant_part,
)
from tilewise.kernels.table import KERNELS, scratch_bytes
from tilewise.plan.emission import ACCESS_OF_ROLE, make_instruction
from tilewise.plan.shapes import round_up
from tilewise.tiles.symbols import Env, Index, IntArray, Loop, grid_values, loops_of, values_of
from tilewise.tiles.trace import (
    Block,
    Line,
    SignalRange,
    SignalView,
    Statement,
    TensorForm,
    Tracer,
    View,
    WaitItem,
)

__all__ = ["ClassEmitter", "Emitted", "Split", "Target", "accesses_of", "emit", "name_of"]

_MOST_TILES = 4096  # tiles of a tensor by which tasks are ordered
_MOST_PAIRS = 1 << 22
_COPIES = ("put", "get")


class Split(Exception):
    """Devices of a class need different instructions.

    Args:
        tracer: the trace of the class.
        groups: the devices of each new class.
    """

    def __init__(self, tracer: Tracer, groups: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.tracer, self.groups = tracer, groups


class _NotALoop(Exception):
    """The statements of a loop cannot be instructions with the loop's iterations as tasks."""


@dataclass(frozen=True)
class Emitted:
    """A traced program as data.

    Attributes:
        program: what devices execute; its tensors begin at byte 0.
        lines: the line of the user's program, by label of an instruction.
        scratch_bytes: scratch memory that a worker needs.
        num_signals: signals that every device needs.
        surplus: posts for which the program does not wait: device, name of the signal, their number
            and the line of one.
        signals: the program's signals, by the names of its arguments.
    """

    program: TileProgram
    lines: Mapping[str, Line]
    scratch_bytes: int
    num_signals: int
    surplus: tuple[tuple[int, str, int, Line | None], ...]
    signals: Mapping[str, SignalRange]


def emit(
    name: str, mesh: DeviceMesh, forms: Sequence[TensorForm], num_signals: int, traces: Sequence[Tracer]
) -> Emitted:
    """Make a program of the traces of all its devices.

    Args:
        name: the program's name.
        forms: its tensors.
        num_signals: number of signals that exist.
        traces: one per class of devices.

    Raises:
        Split: a class must be divided, and traced again.
        PlanError, ShapeError: a statement is invalid; names the line of the user's program.
    """
    entries = _entries(forms, traces)
    posts = np.zeros((mesh.num_devices, num_signals), np.int64)
    targets = [_OwnTarget(forms, entries, tracer.devices) for tracer in traces]
    classes = [ClassEmitter(name, *pair, num_signals, posts) for pair in zip(traces, targets)]
    for of in classes:
        of.emit_body()
    for of in classes:
        of.check_scopes(classes)
    surplus = []
    for of in classes:
        for (device, signal), count in of.drain().items():
            line = next((c.post_lines[signal] for c in classes if signal in c.post_lines), None)
            surplus.append((device, name_of(of.tracer.signals, signal), count, line))
    slots = tuple(Slot("tensor", i) for i in range(len(entries)))
    group = tuple(range(mesh.num_devices))
    devices: dict[int, DeviceBinding] = {}
    templates = []
    for number, of in enumerate(classes):
        template = LoweredTemplate(name, tuple(of.instructions), slots, (), (num_signals,))
        calls = {"run": (Call(0, tuple(range(len(entries)))),)}
        templates.append(DeviceClass((template,), entries, {}, calls))
        for device, numbers in zip(of.devices.tolist(), targets[number].numbers()):
            devices[device] = DeviceBinding(number, numbers, (group,))
    program = TileProgram(tuple(templates), tuple(devices[d] for d in sorted(devices)))
    lines = {label: line for of in classes for label, line in of.lines.items()}
    return Emitted(
        program,
        lines,
        max(of.scratch_bytes for of in classes),
        num_signals,
        tuple(surplus),
        traces[0].signals,
    )


def name_of(signals: Mapping[str, SignalRange], signal: int) -> str:
    """A signal as the program names it."""
    for name, (first, size) in signals.items():
        if first <= signal < first + size:
            return f"{name}[{signal - first}]"
    return f"signal {signal}"


# ---- tensors ----------------------------------------------------------------------------------------------


def _entries(forms: Sequence[TensorForm], traces: Sequence[Tracer]) -> tuple[TensorEntry, ...]:
    """An entry per tensor, cut into the largest tiles that no view cuts."""
    sizes = {form: form.rows for form in forms}
    for tracer in traces:
        for statement in tracer.body.statements():
            for view in (*statement.views(), *statement.reads, *statement.orders):
                begins = np.unique(grid_values(view.begin, tracer.devices))
                sizes[view.form] = gcd(sizes[view.form], view.num_rows, *begins.tolist())
    entries: list[TensorEntry] = []
    handle = 0
    for form in forms:
        tile = max(sizes[form], -(-form.rows // _MOST_TILES))
        if form.is_packed:
            tile = round_up(tile, PANEL_ROWS)
        size = Number(form.rows), form.cols, form.cols  # the stride follows when it is placed
        entries.append(TensorEntry(("symmetric", form.number), 0, *size, form.dtype, tile, handle))
        handle += -(-form.rows // tile)
    return tuple(entries)


# ---- instructions -----------------------------------------------------------------------------------------


class Target(Protocol):
    """Where the instructions of a class go: a program of their own, or a template of a plan."""

    def slot(self, form: TensorForm) -> int:
        """The slot of a tensor."""

    def ref(self, slot: int) -> Ref:
        """The tensor of a slot."""

    def number(self, values: IntArray) -> NumberLike:
        """A number of the device, from its values on the devices of the class."""

    def peers(self, owners: IntArray) -> tuple[int, IntArray]:
        """The device group, and the places in it of one device per device of the class."""

    def signal(self, number: NumberLike) -> NumberLike:
        """The final number of a signal."""


class _OwnTarget:
    """A program of its own: one device group has all devices."""

    def __init__(
        self, forms: Sequence[TensorForm], entries: Sequence[TensorEntry], devices: IntArray
    ) -> None:
        self._slots = {form: slot for slot, form in enumerate(forms)}
        self._refs = [
            Ref(slot, e.extent, e.cols, e.dtype, e.tile_rows, form.is_packed)
            for slot, (form, e) in enumerate(zip(forms, entries))
        ]
        self._devices = devices
        self._numbers: dict[bytes, int] = {}
        self._values: list[IntArray] = []

    def slot(self, form: TensorForm) -> int:
        return self._slots[form]

    def ref(self, slot: int) -> Ref:
        return self._refs[slot]

    def number(self, values: IntArray) -> NumberLike:
        key = np.ascontiguousarray(values).tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._values)
            self._values.append(np.array(values))
        return Number.of_device(self._numbers[key])

    def peers(self, owners: IntArray) -> tuple[int, IntArray]:
        return 0, owners

    def signal(self, number: NumberLike) -> NumberLike:
        return number

    def numbers(self) -> Iterator[tuple[int, ...]]:
        """The numbers of every device of the class."""
        count = len(self._devices)
        table = np.stack(self._values, axis=1) if self._values else np.zeros((count, 0), np.int64)
        return (tuple(row) for row in table.tolist())


class ClassEmitter:
    """Makes the instructions of one class of devices.

    Args:
        name: the program's name.
        tracer: the trace of the class.
        target: where they go.
        num_signals: number of signals that exist.
        posts: per device and signal, the number of posts by other devices; all classes add to it.
    """

    def __init__(self, name: str, tracer: Tracer, target: Target, num_signals: int, posts: IntArray) -> None:
        self.name, self.tracer, self.target, self.posts = name, tracer, target, posts
        self.devices: IntArray = tracer.devices
        self.instructions: list[Instruction] = []
        self.lines: dict[str, Line] = {}
        self.post_lines: dict[int, Line] = {}  # a line that posts a signal
        self.scratch_bytes = 0
        # per device of the class and signal: the value that waits have reached, without posts of the device itself
        self._expected = np.zeros((len(self.devices), num_signals), np.int64)
        self._own_posts = np.zeros_like(self._expected)
        self._carriers = _carriers(tracer.body)
        self._waits: list[tuple[WaitItem, IntArray]] = []  # with the signals' numbers
        # slots of the current statement that may be a peer's: which devices have them themselves
        self._mixed: dict[int, NDArray[np.bool_]] = {}

    def emit_body(self) -> None:
        """Make all instructions."""
        self._emit(self.tracer.body, {})

    def _emit(self, block: Block, loops: Mapping[Loop, IntArray]) -> None:
        for item in block.items:
            if isinstance(item, Statement):
                if self._is_needed(item):
                    self._append(item, *self._single(item, loops))
                continue
            if not self._emit_loop(item, loops):
                loop = item.loop
                assert loop is not None
                first = self._at(loop.first, loops)
                for n in range(loop.count):
                    self._emit(item, {**loops, loop: (first + n) % loop.count})

    def _is_needed(self, statement: Statement) -> bool:
        """Whether a statement becomes an instruction. A wait that other statements have does not."""
        return not statement.is_wait or any(self._carriers[w] is statement for w in statement.waits)

    def _append(
        self, statement: Statement, instruction: Instruction, expected: IntArray, posts: Sequence[Any]
    ) -> None:
        self.instructions.append(instruction)
        self.lines[instruction.label] = statement.line
        self._expected = expected
        for devices, signals, own, count in posts:
            np.add.at(self.posts, (devices, signals), count)
            np.add.at(self._own_posts, own, count)
        if instruction.kernel:
            shapes = [
                (0, 0) if o.null else (self.target.ref(o.slot).extent.constant, self.target.ref(o.slot).cols)
                for o in instruction.operands
            ]
            ints = [constant_part(i) for i in instruction.ints]
            self.scratch_bytes = max(self.scratch_bytes, scratch_bytes(instruction.kernel, ints, shapes))

    # ---- loops --------------------------------------------------------------------------------------------

    def _emit_loop(self, block: Block, loops: Mapping[Loop, IntArray]) -> bool:
        """Make one instruction per statement of a loop; returns False if that is not possible."""
        loop = block.loop
        assert loop is not None
        if loop.count < 2 or any(isinstance(item, Block) for item in block.items):
            return False
        statements = [s for s in block.items if isinstance(s, Statement) and self._is_needed(s)]
        made = []
        expected = self._expected
        try:
            self._require_independent(statements, loop, loops)
            for statement in statements:
                one = self._looped(statement, loop, loops, expected)
                expected = one[1]
                made.append((statement, *one))
        except _NotALoop:
            return False
        for each in made:
            self._append(*each)
        return True

    def _require_independent(
        self, statements: Sequence[Statement], loop: Loop, loops: Mapping[Loop, IntArray]
    ) -> None:
        """Check that all iterations of a statement may precede the next statement."""
        for n, later in enumerate(statements):
            for earlier in statements[:n]:
                own, others = ([w for w in s.waits if loop in w.loops] for s in (earlier, later))
                shared = {w.signal.range for w in own} & {w.signal.range for w in others}
                # another device may post only after the later statement's notify
                if (own and later.notifies) or (shared and own != others):
                    raise _NotALoop
                for a, access in accesses_of(earlier):
                    for b, other in accesses_of(later):
                        if (access | other) & Access.OUT and self._meet(a, b, loop, loops):
                            raise _NotALoop

    def _meet(self, a: View, b: View, loop: Loop, loops: Mapping[Loop, IntArray]) -> bool:
        """Whether the view `a` of an iteration has rows of the view `b` of an earlier one."""
        if a.form != b.form:
            return False
        if len(self.devices) * loop.count**2 > _MOST_PAIRS:
            return True
        first, second = (self._at(view.begin, loops, loop) for view in (a, b))
        overlap = (first[:, None, :] < second[:, :, None] + b.num_rows) & (
            second[:, :, None] < first[:, None, :] + a.num_rows
        )
        is_other = ~np.eye(loop.count, dtype=bool)
        return bool((overlap & (np.triu(is_other) if loop.first == 0 else is_other)).any())

    # ---- one statement ------------------------------------------------------------------------------------

    def _single(
        self, statement: Statement, loops: Mapping[Loop, IntArray]
    ) -> tuple[Instruction, IntArray, Sequence[Any]]:
        """An instruction of one task."""
        rows = next((v.num_rows for v in (*statement.views(), *statement.reads)), 1)
        place = lambda view: self._fixed_rows(statement, view, loops)  # noqa: E731
        draft = self._instruction(statement, Number(rows), 0, place, loops)
        return self._with_signals(statement, draft, loops, None, self._expected)

    def _looped(
        self, statement: Statement, loop: Loop, loops: Mapping[Loop, IntArray], expected: IntArray
    ) -> tuple[Instruction, IntArray, Sequence[Any]]:
        """An instruction whose tasks are a loop's iterations."""
        views = [*statement.views(), *statement.reads, *statement.orders]
        moving = {v.num_rows for v in views if self._moves(v, loop, loops)}
        step = max(moving, default=1)
        if any(step % rows for rows in moving):
            raise _NotALoop
        place = lambda view: self._rows_of_loop(statement, view, step, loop, loops)  # noqa: E731
        draft = self._instruction(statement, Number(step * loop.count), step, place, loops, loop)
        instruction, expected, posts = self._with_signals(statement, draft, loops, loop, expected)
        first = self._number(self._at(loop.first, loops) % loop.count)
        return (replace(instruction, first=first) if first else instruction), expected, posts

    def _instruction(
        self,
        statement: Statement,
        extent: Number,
        step: int,
        place: Any,
        loops: Mapping[Loop, IntArray],
        loop: Loop | None = None,
    ) -> Instruction:
        label = f"{self.name}:{statement.line.number}/{statement.label}"
        if not statement.name:
            reads = [place(view)._replace(access=Access.IN) for view in statement.reads]
            orders = [place(view)._replace(access=Access.INOUT) for view in statement.orders]
            return Instruction("", label, extent, step, (*reads, *orders), priority=2)

        def placed(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [place(view) for view in value]
            return None if value is None else place(value)

        def integer(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [integer(v) for v in value]
            if isinstance(value, Index) and loop in value.loops:
                raise _NotALoop
            return self._number(self._at(value, loops)) if isinstance(value, Index) else value

        self._mixed = {}
        tiles = {name: placed(value) for name, value in statement.operands.items()}
        every = [
            o
            for tile in tiles.values()
            for o in (tile if isinstance(tile, list) else [tile])
            if o is not None
        ]
        for operand in every:
            if operand.group < 0 and operand.slot in self._mixed:  # a task has one access per tile
                self._split(self._mixed[operand.slot])
        ints = {name: integer(value) for name, value in statement.ints.items()}
        try:
            draft: Draft = make_instruction(
                statement.name,
                maker="",
                label=label,
                extent=extent,
                step=step,
                tiles={name: tile for name, tile in tiles.items() if tile is not None},
                ref_of=self.target.ref,
                dtype=statement.dtype,
                ints=ints,
                floats=statement.floats,
                priority=2 if statement.label in _COPIES else 0,
                writes_peers=True,
            )
        except InternalError as error:
            _invalid_call(self.tracer, statement, str(error))
        instruction = draft.instruction
        if statement.is_joined and statement.label == "put":  # a later task waits for it by its source
            source = instruction.operands[1]
            if source.access == Access.IN:
                operands = (instruction.operands[0], source._replace(access=Access.INOUT, role=Access.IN))
                instruction = replace(instruction, operands=operands)
        return instruction

    def _at(self, index: Any, loops: Mapping[Loop, IntArray], loop: Loop | None = None) -> IntArray:
        """Values of an expression: `[devices]`, or `[devices, iterations]` of a loop."""
        count = len(self.devices)
        if loop is None:
            env = Env(self.devices, loops)
            return np.broadcast_to(np.asarray(values_of(index, env), np.int64), (count,))
        outer = {other: values[:, None] if values.ndim else values for other, values in loops.items()}
        env = Env(self.devices[:, None], {**outer, loop: np.arange(loop.count)[None, :]})
        return np.broadcast_to(np.asarray(values_of(index, env), np.int64), (count, loop.count))

    def _number(self, values: IntArray) -> NumberLike:
        """A constant, or a number of the device."""
        if (values == values[0]).all():
            return int(values[0])
        return self.target.number(values)

    def _split(self, values: NDArray[Any]) -> NoReturn:
        """Divide the class by a value."""
        raise Split(
            self.tracer,
            [tuple(self.devices[values == value].tolist()) for value in np.unique(values).tolist()],
        )

    # ---- views --------------------------------------------------------------------------------------------

    def _moves(self, view: View, loop: Loop, loops: Mapping[Loop, IntArray]) -> bool:
        begins = self._at(view.begin, loops, loop)
        return bool((begins != begins[:, :1]).any())

    def _owner(
        self, view: View, loops: Mapping[Loop, IntArray], loop: Loop | None = None
    ) -> tuple[int, NumberLike]:
        """Device group and member of the device that has a view."""
        if view.owner is None:
            return -1, 0
        owners = self._at(view.owner, loops, loop)
        if loop is not None:
            if (owners != owners[:, :1]).any():
                raise _NotALoop
            owners = owners[:, 0]
        is_own = owners == self.devices
        if is_own.all():
            return -1, 0
        if is_own.any():
            self._mixed[self.target.slot(view.form)] = is_own
        group, members = self.target.peers(owners)
        return group, self._number(members)

    def _check_rows(self, statement: Statement, view: View, begins: IntArray) -> None:
        low, high = int(begins.min()), int(begins.max()) + view.num_rows
        if low < 0 or high > view.form.rows:
            self.tracer.invalid(
                f"rows must be within the {view.form.rows} rows of the tensor",
                f"[{low if low < 0 else high - view.num_rows}:{low + view.num_rows if low < 0 else high}]",
                "check the expression of the slice",
                statement.line,
                ShapeError,
            )
        if view.form.is_packed and (begins % PANEL_ROWS).any():
            self.tracer.invalid(
                f"rows of a packed weight must begin at a multiple of {PANEL_ROWS}",
                str(int(begins.max())),
                "cut it at panels",
                statement.line,
                ShapeError,
            )

    def _fixed_rows(self, statement: Statement, view: View, loops: Mapping[Loop, IntArray]) -> Operand:
        begins = self._at(view.begin, loops)
        self._check_rows(statement, view, begins)
        group, member = self._owner(view, loops)
        slot, is_whole = self.target.slot(view.form), view.num_rows == view.form.rows
        if view.columns is not None:
            if begins.any():
                self._no_columns(statement)
            first = self._columns(statement, view, loops)
            return Operand(slot, Mode.ROWCOLS, group=group, member=member, part=first, parts=view.columns[1])
        if is_whole:
            return Operand(slot, Mode.WHOLE, group=group, member=member)
        return Operand(
            slot, Mode.ROWS, group=group, member=member, part=self._number(begins), parts=view.num_rows
        )

    def _rows_of_loop(
        self, statement: Statement, view: View, step: int, loop: Loop, loops: Mapping[Loop, IntArray]
    ) -> Operand:
        begins = self._at(view.begin, loops, loop)
        if not self._moves(view, loop, loops):
            if view.columns is not None:
                raise _NotALoop
            fixed = replace(view, begin=_constant(self.tracer, begins[:, 0], self.devices))
            if view.owner is not None:
                owners = self._at(view.owner, loops, loop)
                if (owners != owners[:, :1]).any():
                    raise _NotALoop
                fixed = replace(fixed, owner=_constant(self.tracer, owners[:, 0], self.devices))
            return self._fixed_rows(statement, fixed, loops)
        self._check_rows(statement, view, begins)
        rows, first = view.num_rows, begins[:, 0]
        if (np.diff(begins, axis=1) != rows).any():
            raise _NotALoop
        group, member = self._owner(view, loops, loop)
        slot = self.target.slot(view.form)
        covers = not first.any() and rows * loop.count == view.form.rows
        if view.columns is not None:
            if first.any() or loop in loops_of(view.columns[0]):
                raise _NotALoop
            column = self._columns(statement, view, loops)
            return Operand(
                slot,
                Mode.ROWCOLS,
                group=group,
                member=member,
                div=step // rows,
                part=column,
                parts=view.columns[1],
            )
        if covers:
            return Operand(slot, Mode.ROW, group=group, member=member, div=step // rows)
        if rows != step:
            raise _NotALoop
        return Operand(slot, Mode.ROWPART, group=group, member=member, offset=self._number(first))

    def _columns(self, statement: Statement, view: View, loops: Mapping[Loop, IntArray]) -> NumberLike:
        """The first column of a view of some columns."""
        assert view.columns is not None
        values, count = self._at(view.columns[0], loops), view.columns[1]
        if values.min() < 0 or values.max() + count > view.form.cols:
            self.tracer.invalid(
                f"columns must be within the {view.form.cols} columns of the tensor",
                f"[{int(values.min())}:{int(values.max()) + count}]",
                "check the expression of the slice",
                statement.line,
                ShapeError,
            )
        return self._number(values)

    def _no_columns(self, statement: Statement) -> NoReturn:
        self.tracer.invalid(
            "a slice of columns must have all rows, or adjacent tiles of a loop from row 0 on",
            "other rows",
            "put the columns into a tensor of their own",
            statement.line,
        )

    # ---- signals ------------------------------------------------------------------------------------------

    def _signals(
        self, view: SignalView, line: Line, loops: Mapping[Loop, IntArray], loop: Loop | None
    ) -> IntArray:
        index = self._at(view.index, loops, loop)
        if index.min() < 0 or index.max() >= view.range.size:
            odd = int(index.min() if index.min() < 0 else index.max())
            self.tracer.invalid(
                f"a signal's index must be between 0 and {view.range.size - 1}",
                str(odd),
                "check the index",
                line,
            )
        return index + view.range.first

    def _with_signals(
        self,
        statement: Statement,
        instruction: Instruction,
        loops: Mapping[Loop, IntArray],
        loop: Loop | None,
        expected: IntArray,
    ) -> tuple[Instruction, IntArray, list[Any]]:
        """Add waits and posts. Returns also what devices expect afterwards, and the posts."""
        expected = expected.copy()
        waits = [w for item in statement.waits for w in self._wait(statement, item, loops, loop, expected)]
        notifies: list[Notify] = []
        posts: list[Any] = []
        for post in statement.notifies:
            signals = self._signals(post.signal, post.line, loops, loop)
            owners = self._at(post.device, loops, loop)
            is_own = owners == _per_device(self.devices, owners.ndim)
            if post.scope == "gpu" and not is_own.all():
                self.tracer.invalid(
                    'a notify with scope "gpu" posts a signal of its own device',
                    "another device's",
                    'use scope="sys"',
                    post.line,
                )
            if loop is not None and (owners != owners[:, :1]).any():
                raise _NotALoop
            self.post_lines.update(dict.fromkeys(np.unique(signals).tolist(), post.line))
            base, per_index = self._base(signals, loop)
            group, members = self.target.peers(owners if loop is None else owners[:, 0])
            notifies += [Notify(group, self._number(members), base, per_index)] * post.value
            rows = np.broadcast_to(_per_device(np.arange(len(self.devices)), owners.ndim), owners.shape)
            posts.append((owners[~is_own], signals[~is_own], (rows[is_own], signals[is_own]), post.value))
        return replace(instruction, waits=tuple(waits), notifies=tuple(notifies)), expected, posts

    def _base(self, signals: IntArray, loop: Loop | None) -> tuple[NumberLike, bool]:
        """The first signal, and whether each iteration has its own."""
        if loop is None:
            return self.target.signal(self._number(signals)), False
        steps = np.diff(signals, axis=1)
        if steps.any() and (steps != 1).any():
            raise _NotALoop
        return self.target.signal(self._number(signals[:, 0])), bool(steps.any())

    def _wait(
        self,
        statement: Statement,
        item: WaitItem,
        loops: Mapping[Loop, IntArray],
        loop: Loop | None,
        expected: IntArray,
    ) -> list[Wait]:
        is_outer = loop is not None and loop not in item.loops
        inner = None if is_outer else loop
        signals = self._signals(item.signal, item.line, loops, inner)
        base, per_index = self._base(signals, inner)
        self._waits.append((item, signals))
        if self._carriers[item] is not statement:
            return [Wait(base, per_index, 0)]
        values = self._at(item.value, loops, inner)
        rows = np.arange(len(self.devices))
        wanted = values - self._own_posts[_per_device(rows, values.ndim), signals]
        if inner is None:
            increment = np.maximum(wanted - expected[rows, signals], 0)
            self._require_uniform(increment)
            expected[rows, signals] += increment
            return [Wait(base, False, int(increment[0]))]
        if per_index:
            increments = np.maximum(wanted - expected[rows[:, None], signals], 0)
        else:
            reached = np.maximum.accumulate(np.maximum(wanted, expected[rows[:, None], signals]), axis=1)
            increments = np.diff(reached, axis=1, prepend=expected[rows[:, None], signals[:, :1]])
        if (increments != increments[:, :1]).any():
            raise _NotALoop
        self._require_uniform(increments[:, 0])
        np.add.at(expected, (np.broadcast_to(rows[:, None], signals.shape), signals), increments)
        return [Wait(base, per_index, int(increments[0, 0]))]

    def _require_uniform(self, increments: IntArray) -> None:
        if (increments != increments[0]).any():
            self._split(increments)

    def check_scopes(self, classes: Sequence[ClassEmitter]) -> None:
        """Reject waits inside of a device for signals that other devices post."""
        for item, signals in self._waits:
            if (
                item.scope == "gpu"
                and self.posts[
                    np.broadcast_to(_per_device(self.devices, signals.ndim), signals.shape),
                    signals,
                ].any()
            ):
                self.tracer.invalid(
                    'a wait with scope "gpu" waits for a signal that only its own device posts',
                    "one that another device posts",
                    'use scope="sys"',
                    item.line,
                )

    def drain(self) -> dict[tuple[int, int], int]:
        """Wait at the end for posts for which no statement waits. Returns their number, by device and
        signal.
        """
        left = self.posts[self.devices] - self._expected
        lost = np.argwhere(left < 0)
        if len(lost):
            place, signal = (int(v) for v in lost[0])
            line = next((i.line for i, s in reversed(self._waits) if (s == signal).any()), None)
            raise PlanError(
                f"[tiles.{self.name}] a signal must be posted as often as the program waits for; got "
                f"{int(self.posts[self.devices[place], signal])} posts of {name_of(self.tracer.signals, signal)} of "
                f"device {int(self.devices[place])}, and a wait for {int(self._expected[place, signal])} at {line}; "
                "post it, or wait for less"
            )
        surplus: dict[tuple[int, int], int] = {}
        for signal in np.flatnonzero(left.any(axis=0)).tolist():
            self._require_uniform(left[:, signal])
            count = int(left[0, signal])
            label = f"{self.name}/end"
            wait = Wait(self.target.signal(signal), False, count)
            self.instructions.append(Instruction("", label, Number(1), 0, (), waits=(wait,)))
            surplus |= {(device, signal): count for device in self.devices.tolist()}
        return surplus


def _carriers(body: Block) -> dict[WaitItem, Statement]:
    """For each wait, the statement whose instruction raises the value that its device expects: the
    first statement that has the wait, if it is in the same loops, else the wait itself.
    """
    carriers: dict[WaitItem, Statement] = {}
    is_consumed: set[WaitItem] = set()
    for statement in body.statements():
        for item in statement.waits:
            if statement is item.place:
                carriers[item] = statement
            elif item not in is_consumed:
                is_consumed.add(item)
                if item.place.is_wait and statement.loops == item.loops:
                    carriers[item] = statement
    return carriers


def accesses_of(statement: Statement) -> Iterator[tuple[View, Access]]:
    """The views of a statement, and how it uses them: first those that it reads."""
    roles: list[tuple[View, Access]] = []
    if statement.name:
        for operand in KERNELS[statement.name].operands:
            value = statement.operands.get(operand.name)
            views = value if isinstance(value, list) else [value]
            roles += [(view, ACCESS_OF_ROLE[operand.role]) for view in views if view is not None]
    roles += [(view, Access.IN) for view in statement.reads]
    roles += [(view, Access.INOUT) for view in statement.orders]
    yield from sorted(roles, key=lambda use: use[1] == Access.OUT)


def _per_device(values: IntArray, ndim: int) -> IntArray:
    """Values per device, with `ndim` dims, so that they broadcast over iterations."""
    return values.reshape(-1, *[1] * (ndim - 1))


def _constant(tracer: Tracer, values: IntArray, devices: IntArray) -> Index:
    """An expression with known values on a class's devices."""
    table = np.zeros(tracer.mesh.num_devices, np.int64)
    table[devices] = values
    return Index(tracer, lambda env: table[env.devices])


_MESSAGE = re.compile(r"\[plan\.emission\] (.*); got (.*?)(?: for kernel '.*)?$", re.DOTALL)


def _invalid_call(tracer: Tracer, statement: Statement, message: str) -> NoReturn:
    """Turn an error about an instruction into one about the user's call."""
    match = _MESSAGE.match(message)
    rule, got = match.groups() if match else (message, "another call")
    tracer.invalid(
        rule,
        f"{got} for kernel {statement.name!r}",
        "see the kernel's declaration in tilewise.kernels.table",
        statement.line,
        ShapeError,
    )
