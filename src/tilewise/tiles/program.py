"""`@tile_program`: a Python function that is traced once, and then runs on all devices of a group
without Python.

The trace is cached by the mesh and by the forms of the arguments. `tiles.trace` records it,
`tiles.emit` makes a program of it, `Program.finish` proves that it cannot block, and
`tiles.checker` finds accesses that no signal orders.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from tilewise.comm.primitives import interpreting
from tilewise.core.errors import PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.core.validation import Validator, shown
from tilewise.ir.program import TileProgram
from tilewise.runtime import Program
from tilewise.session.assemble import native_program
from tilewise.tiles.checker import check_program
from tilewise.tiles.emit import Emitted, Split, emit
from tilewise.tiles.group import DeviceGroup, Signals, SymmTensor
from tilewise.tiles.handles import ProgramHandle
from tilewise.tiles.trace import Line, SignalRange, TensorForm, Tracer, arguments_of

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
            made = native_program(program, ()), program
            self._placed[key] = made
            if len(self._placed) > _MOST_PLACED:
                self._placed.popitem(last=False)
        self._placed.move_to_end(key)
        return made

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

    def __call__(self, *arguments: Any) -> None:
        """Run the program on all devices, and wait for its end.

        Args:
            arguments: at least one symmetric tensor; signals of the same group; and other values,
                which are constants of the trace and must be hashable.

        Raises:
            PlanError, ShapeError: the program is invalid; names the line. Nothing has run.
            TaskFailed: a task failed.
        """
        group, tensors = _group_of(self.name, arguments)
        traced = self.trace(*arguments)
        group.run_program(*traced.place(tensors))

    def start(self, *arguments: Any) -> ProgramHandle:
        """Run the program in the background, after all programs of the group that were called before.

        Raises:
            PlanError, ShapeError: as for a call.
        """
        group, tensors = _group_of(self.name, arguments)
        return group.start_program(*self.trace(*arguments).place(tensors))

    def trace(self, *arguments: Any) -> TracedProgram:
        """The program for arguments of these forms, which is traced at the first call.

        Raises:
            PlanError, ShapeError: as for a call.
        """
        group, tensors = _group_of(self.name, arguments)
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

    def _trace(
        self, group: DeviceGroup, tensors: Sequence[SymmTensor], forms: Sequence[object]
    ) -> TracedProgram:
        todo: list[tuple[int, ...]] = [tuple(range(group.mesh.num_devices))]
        traces: list[Tracer] = []
        while True:
            while todo:
                tracer = self._trace_devices(group, todo.pop(), forms)
                todo += tracer.others
                traces.append(tracer)
            traces.sort(key=lambda t: int(t.devices[0]))
            own = tuple(dict.fromkeys(f for f in forms if isinstance(f, TensorForm)))
            try:
                emitted = emit(self.name, group.mesh, own, group._num_signals, traces)
                break
            except Split as split:
                traces.remove(split.tracer)
                todo += split.groups
        traced = TracedProgram(self.name, group.mesh, own, emitted)
        native, _ = traced.place(tensors)
        if self._check:
            check_program(self.name, native, emitted)
        return traced

    def _trace_devices(
        self, group: DeviceGroup, devices: Sequence[int], forms: Sequence[object]
    ) -> Tracer:
        barrier = SignalRange(0, group.mesh.num_devices)
        tracer = Tracer(self.name, group.mesh, devices, barrier, {})
        with interpreting(tracer):
            self.function(*arguments_of(tracer, forms))
        tracer.finish()
        return tracer


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
