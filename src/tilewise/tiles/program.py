"""`@tile_program`: a Python function that is traced once, and then runs on all devices of a group
without Python.

The trace is cached by the mesh and by the forms of the arguments. `tiles.trace` records it,
`tiles.emit` makes a program of it, `Program.finish` proves that it cannot block, and
`tiles.checker` finds accesses that no signal orders.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from tilewise.comm.primitives import active_interpreter, interpreting
from tilewise.core.errors import PlanError
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.core.validation import Validator, shown
from tilewise.ir.graph import PANEL_ROWS
from tilewise.ir.layout import PendingReduction
from tilewise.ir.program import TileProgram
from tilewise.plan.file import digest_of
from tilewise.plan.lower import TemplateLowering
from tilewise.plan.shapes import round_up
from tilewise.runtime import CallHandle, Program
from tilewise.session.assemble import native_program
from tilewise.tiles.checker import check_program
from tilewise.tiles.emit import Emitted, Split, emit, name_of
from tilewise.tiles.group import DeviceGroup, Signals, SymmTensor
from tilewise.tiles.in_graph import lower_program
from tilewise.tiles.trace import SignalRange, TensorForm, Tracer, arguments_of

__all__ = ["TileProgramFunction", "TracedProgram", "tile_program"]

_MOST_PLACED = 64  # native programs per trace, one per set of tensors
_validate = Validator("tiles", PlanError)


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """A tile program for one mesh and one form of arguments.

    Attributes:
        name: the function's name.
        mesh: the devices.
        forms: its tensors, in the order of the arguments.
        emitted: the instructions.
    """

    name: str
    mesh: DeviceMesh
    forms: tuple[TensorForm, ...]
    emitted: Emitted
    _placed: OrderedDict[tuple[int, ...], tuple[Program, TileProgram]] = field(default_factory=OrderedDict)

    def place(self, tensors: Sequence[SymmTensor]) -> tuple[Program, TileProgram]:
        """The program on these tensors, proven not to block.

        Raises:
            PlanError: devices would wait for each other; names the tasks.
        """
        key = tuple(tensor.offset for tensor in tensors)
        made = self._placed.get(key)
        if made is None:
            program = _placed(self.emitted.program, tensors)
            try:
                made = native_program(program, ()), program
            except PlanError as error:
                raise PlanError(_in_words_of(self.name, self.emitted, str(error))) from None
            self._placed[key] = made
            if len(self._placed) > _MOST_PLACED:
                self._placed.popitem(last=False)
        self._placed.move_to_end(key)
        return made

    def digest(self) -> str:
        """SHA-256 of the program. Equal functions, meshes and forms have equal digests."""
        return digest_of(self.emitted.program)

    def explain(self) -> str:
        """The program's instructions per class of devices, as text."""
        lines = [f"tile program {self.name} on {self.mesh}"]
        for number, of in enumerate(self.emitted.program.classes):
            devices = [d for d, b in enumerate(self.emitted.program.devices) if b.class_id == number]
            lines.append(f"devices {', '.join(map(str, devices))}:")
            for i in of.templates[0].instructions:
                tasks = -(-i.extent.constant // i.step) if isinstance(i.step, int) and i.step else 1
                lines.append(
                    f"  {i.label}: {tasks} task{'s' if tasks > 1 else ''} of {i.kernel or 'no kernel'}, "
                    f"waits for {len(i.waits)}, posts {len(i.notifies)}"
                )
        return "\n".join(lines)


class TileProgramFunction:
    """What `@tile_program` makes of a function. Calling it runs it on the group of its arguments."""

    def __init__(self, function: Callable[..., None], check: bool) -> None:
        functools.update_wrapper(self, function)
        self.function, self.name, self._check = function, function.__name__, check
        self._traced: dict[object, TracedProgram] = {}
        self._checked: set[object] = set()

    def __call__(self, *arguments: Any) -> None:
        """Run the program on all devices, and wait for its end. In another program, or in
        `tw.comm.local(n).run`, it is called as the plain function.

        Args:
            arguments: at least one symmetric tensor; signals of the same group; and other values,
                which are constants of the trace and must be hashable.

        Raises:
            PlanError, ShapeError: the program is invalid; names the line. Nothing has run.
            TaskFailed: a task failed.
        """
        if active_interpreter() is not None:  # inside of another program it is a part of that program
            self.function(*arguments)
            return
        group, tensors = _group_of(self.name, arguments)
        group.run_program(*self._traced_for(group, tensors, arguments).place(tensors))

    def start(self, *arguments: Any) -> CallHandle:
        """Run the program in the background, after all programs of the group that were called before.

        Raises:
            PlanError, ShapeError: as for a call.
        """
        group, tensors = _group_of(self.name, arguments)
        return group.start_program(*self._traced_for(group, tensors, arguments).place(tensors))

    def trace(self, *arguments: Any) -> TracedProgram:
        """The program for arguments of these forms, which is traced at the first call.

        Raises:
            PlanError, ShapeError: as for a call.
        """
        return self._traced_for(*_group_of(self.name, arguments), arguments)

    def _traced_for(
        self, group: DeviceGroup, tensors: Sequence[SymmTensor], arguments: Sequence[object]
    ) -> TracedProgram:
        forms = tuple(_form(self.name, argument, group, tensors) for argument in arguments)
        key = group.mesh, group._num_signals, forms
        try:
            made = self._traced.get(key)
        except TypeError:
            _validate.invalid(
                self.name,
                "arguments besides tensors and signals must be hashable",
                shown([a for a in arguments if not isinstance(a, SymmTensor | Signals)]),
                "pass numbers, strings or tuples",
            )
        if made is None:
            made = self._traced[key] = self._trace(group, tensors, forms)
        return made

    def lower(
        self,
        low: TemplateLowering,
        *arguments: object,
        axes: Axes,
        completes: PendingReduction | None = None,
    ) -> None:
        """Let the program be the lowering of an op of a graph, or a part of it. Call it in `Op.lower`.

        Args:
            low: what `Op.lower` gets.
            arguments: the program's arguments: for tensors the device's parts (`low.tensor(...)`,
                `low.temp(...)`), for signals `NewSignals(count)`, and other values.
            axes: the axes of the mesh along which the program's devices are numbered.
            completes: the pending reduction of the op that the program completes on all devices.

        Raises:
            PlanError, ShapeError: the program is invalid; names the line.
        """
        lower_program(self, low, arguments, axes, completes)

    def check_on(self, axes: tuple[tuple[str, int], ...], forms: tuple[object, ...]) -> None:
        """Trace the program for arguments of these forms on a mesh of its own, and check it."""
        if self._check and (axes, forms) not in self._checked:
            mesh = DeviceMesh(dict(axes))
            sizes = [f.first + f.size for f in forms if isinstance(f, SignalRange)]
            emitted = self._emit(mesh, max([mesh.num_devices, *sizes]), forms)
            native = native_program(_one_after_another(emitted.program), ())
            check_program(self.name, native, emitted)
            self._checked.add((axes, forms))

    def _trace(
        self, group: DeviceGroup, tensors: Sequence[SymmTensor], forms: Sequence[object]
    ) -> TracedProgram:
        emitted = self._emit(group.mesh, group._num_signals, forms)
        traced = TracedProgram(self.name, group.mesh, _tensors(forms), emitted)
        native, _ = traced.place(tensors)
        if self._check:
            check_program(self.name, native, emitted)
        return traced

    def _emit(self, mesh: DeviceMesh, num_signals: int, forms: Sequence[object]) -> Emitted:
        """Trace the function for all devices, class by class."""
        todo: list[tuple[int, ...]] = [tuple(range(mesh.num_devices))]
        traces: list[Tracer] = []
        while True:
            while todo:
                tracer = self._trace_devices(mesh, todo.pop(), forms)
                todo += tracer.others
                traces.append(tracer)
            traces.sort(key=lambda t: int(t.devices[0]))
            try:
                return emit(self.name, mesh, _tensors(forms), num_signals, traces)
            except Split as split:
                traces.remove(split.tracer)
                todo += split.groups

    def _trace_devices(self, mesh: DeviceMesh, devices: Sequence[int], forms: Sequence[object]) -> Tracer:
        tracer = Tracer(self.name, mesh, devices, SignalRange(0, mesh.num_devices))
        with interpreting(tracer):
            self.function(*arguments_of(tracer, self.function, forms))
        tracer.finish()
        return tracer


def _tensors(forms: Sequence[object]) -> tuple[TensorForm, ...]:
    return tuple(dict.fromkeys(f for f in forms if isinstance(f, TensorForm)))


@overload
def tile_program(function: Callable[..., None]) -> TileProgramFunction: ...


@overload
def tile_program(*, check: bool = True) -> Callable[[Callable[..., None]], TileProgramFunction]: ...


def tile_program(function: Callable[..., None] | None = None, *, check: bool = True) -> Any:
    """Make a tile program of a function that is written for one device (SPMD).

    The function calls the primitives of `tilewise.comm`. It is traced when it is called for the
    first time with arguments of a form, and later calls run the result natively.

    Args:
        function: the function.
        check: look for races, lost signals and unconsumed tokens when the function is traced.
    """
    if function is None:
        return lambda function: TileProgramFunction(function, check)
    return TileProgramFunction(function, check)


def _group_of(name: str, arguments: Sequence[object]) -> tuple[DeviceGroup, list[SymmTensor]]:
    """The group of all arguments, and their tensors without repetitions."""
    tensors = list(dict.fromkeys(a for a in arguments if isinstance(a, SymmTensor)))
    groups = {id(a.group): a.group for a in arguments if isinstance(a, SymmTensor | Signals)}
    if not tensors or len(groups) != 1:
        _validate.invalid(
            name,
            "a tile program needs symmetric tensors of one group",
            f"{len(tensors)} tensors of {len(groups)} groups",
            "allocate them with DeviceGroup.symm_tensor",
        )
    return tensors[0].group, tensors


def _form(name: str, argument: object, group: DeviceGroup, tensors: Sequence[SymmTensor]) -> object:
    if isinstance(argument, SymmTensor):
        return TensorForm(tensors.index(argument), argument.shape, argument.dtype, argument.is_packed)
    if isinstance(argument, Signals):
        return SignalRange(argument.first, argument.count)
    return argument


def _one_after_another(program: TileProgram) -> TileProgram:
    """A program whose tensors do not overlap, to be checked."""
    offset, offsets = 0, []
    for entry in program.classes[0].entries:
        offsets.append(offset)
        offset += round_up(entry.extent.constant, PANEL_ROWS) * (entry.cols + 1) * 8
    classes = tuple(
        replace(of, entries=tuple(e._replace(offset=o) for e, o in zip(of.entries, offsets)))
        for of in program.classes
    )
    return replace(program, classes=classes)


def _in_words_of(name: str, emitted: Emitted, message: str) -> str:
    """A message of native code about a program, with the program's lines and names of signals."""

    def with_line(label: re.Match[str]) -> str:
        line = emitted.lines.get(label[1])
        return label[0] if line is None else f"{label[0]} ({line})"

    message = re.sub(r"^\[[\w.]+\]", f"[tiles.{name}]", message)
    message = re.sub(r"'([^']+)'\[\d+\]", with_line, message)
    return re.sub(r"\bsignal (\d+)\b", lambda m: name_of(emitted.signals, int(m[1])), message)


def _placed(program: TileProgram, tensors: Sequence[SymmTensor]) -> TileProgram:
    """A program with its tensors' places in memory."""
    return replace(
        program,
        classes=tuple(
            replace(
                of,
                entries=tuple(
                    e._replace(offset=t.offset, stride=t.stride) for e, t in zip(of.entries, tensors)
                ),
            )
            for of in program.classes
        ),
    )
