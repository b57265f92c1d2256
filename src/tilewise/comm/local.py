"""`local(n)`: the primitives of tile programs, called eagerly between threads of one process.

A device is a thread and its NumPy arrays. This is for learning, and for comparison with traced
programs: it has all primitives of `comm.primitives`, as OpenSHMEM defines them, and reports what no
traced program may do. It is slow, and nothing crosses the process.

    devices = local(2)
    x, ready = devices.symm_tensor((4, 8), "f32"), devices.signals(1)
    devices.run(program, x, ready)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import eq, ge, gt, index, le, lt, ne
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tilewise.comm.local_schedule import Released, Schedule
from tilewise.comm.primitives import active_interpreter, interpreting
from tilewise.core.dtypes import DType
from tilewise.core.dtypes import dtype as to_dtype
from tilewise.core.errors import PlanError, ShapeError, TaskFailed, TilewiseError
from tilewise.core.mesh import DeviceMesh
from tilewise.core.validation import Validator, shown

__all__ = ["LocalDevices", "LocalSignal", "LocalSignals", "LocalTensor", "local"]

_validate = Validator("comm", PlanError)
_validate_shape = Validator("comm", ShapeError)
_COMPARE: dict[str, Callable[[int, int], bool]] = {"eq": eq, "ne": ne, "gt": gt, "ge": ge, "lt": lt, "le": le}
_SYMBOLS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_VALUES = 1 << 64
_TIMEOUT_S = 60.0
_MAX_SHOWN = 4  # signals in a message
_T = TypeVar("_T")


def local(
    devices: int | Mapping[str, int], *, delays: int | None = None, timeout_s: float = _TIMEOUT_S
) -> LocalDevices:
    """Devices that are threads of this process.

    Args:
        devices: their number, or the size of each named axis, for example `{"dp": 2, "tp": 2}`.
        delays: None for threads that run freely, and puts and signals that arrive at once. A number
            makes one thread run at a time, and puts and signals arrive late, in any order that
            OpenSHMEM permits. The number chooses among all possible runs, always the same one. A
            program that lacks a wait, `fence` or `quiet` fails for some numbers.
        timeout_s: how long a wait or barrier may take if it does not say so itself.

    Raises:
        PlanError: an argument is invalid.
        LayoutError: an axis is invalid.
    """
    if isinstance(devices, Mapping):
        mesh = DeviceMesh(devices)
    else:
        mesh = DeviceMesh({"devices": _validate.integer("local", "the number of devices", devices, 1, 1024)})
    seed = None if delays is None else _validate.integer("local", "delays", delays, 0, _VALUES - 1)
    return LocalDevices(
        mesh, seed, _validate.seconds("local", "timeout_s", timeout_s, is_positive=True) or 0.0
    )


@dataclass(frozen=True, eq=False)
class _Memory:
    """One allocation of symmetric memory: an array per device."""

    group: LocalDevices
    name: str
    dtype: DType
    copies: tuple[NDArray[Any], ...]


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """A symmetric tensor, or rows of it: of the device that uses it, or of one device.

    Attributes:
        owner: number of the device whose copy it is; None for the device that uses it.
        begin, end: its rows.
    """

    _memory: _Memory
    owner: int | None
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dims."""
        return (self.end - self.begin, *self._memory.copies[0].shape[1:])

    @property
    def dtype(self) -> str:
        """Element type, for example `f32`."""
        return self._memory.dtype.name

    @property
    def name(self) -> str:
        """Its name in messages, with the rows unless they are all."""
        is_whole = (self.begin, self.end) == (0, len(self._memory.copies[0]))
        return self._memory.name + ("" if is_whole else f"[{self.begin}:{self.end}]")

    def __getitem__(self, rows: slice) -> LocalTensor:
        """The rows `x[begin:end]`.

        Raises:
            ShapeError: the index is no slice, has a step, or exceeds the rows.
        """
        size = self.end - self.begin
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            _validate_shape.invalid(
                "tensor", f"an index of {self.name!r} must be rows", shown(rows), "write x[begin:end]"
            )
        begin = 0 if rows.start is None else index(rows.start)
        end = size if rows.stop is None else index(rows.stop)
        if not 0 <= begin <= end <= size:
            _validate_shape.invalid(
                "tensor",
                f"rows of {self.name!r} must lie in 0 to {size}",
                f"[{begin}:{end}]",
                "correct the index",
            )
        return replace(self, begin=self.begin + begin, end=self.begin + end)

    def tile(self, index: int, *, rows: int) -> LocalTensor:
        """The rows `x[index * rows : (index + 1) * rows]`."""
        return self[index * rows : (index + 1) * rows]

    def numpy(self, device: int | None = None) -> NDArray[Any]:
        """The elements, without a copy. Writing to the array writes to the tensor. The array has
        `__dlpack__` for other libraries.

        Args:
            device: whose copy; None for `owner`, or for the device that calls this.

        Raises:
            PlanError: there is no such device, or no program runs and `device` is None.
        """
        group = self._memory.group
        owner = self.owner if device is None else group._device("numpy", device)
        copy = self._memory.copies[group._acting("numpy") if owner is None else owner]
        return copy[self.begin : self.end]


@dataclass(eq=False)
class _Word:
    """One signal of one device.

    Attributes:
        value: its value.
        operator: how it is changed (`set`, `add` or `compare_swap`); empty before the first use.
        poster: another device that has posted it; -1 if only its own device has.
        is_gpu: whether the device has waited for it with scope `gpu`.
    """

    value: int = 0
    operator: str = ""
    poster: int = -1
    is_gpu: bool = False

    def apply(self, operator: str, value: int) -> None:
        """Change the value as the operator says."""
        self.value = value if operator == "set" else (self.value + value) % _VALUES


@dataclass(frozen=True, eq=False)
class LocalSignal:
    """One signal. It exists on every device."""

    _group: LocalDevices
    name: str
    words: tuple[_Word, ...]

    def value(self, device: int | None = None) -> int:
        """Its value now, without waiting and without any order.

        Args:
            device: whose signal; None for the device that calls this.

        Raises:
            PlanError: there is no such device, or no program runs and `device` is None.
        """
        owner = self._group._acting("value") if device is None else self._group._device("value", device)
        return self.words[owner].value


@dataclass(frozen=True, eq=False)
class LocalSignals(Sequence[LocalSignal]):
    """Several signals. An index gives one of them, and a slice some of them."""

    _signals: tuple[LocalSignal, ...]

    def __len__(self) -> int:
        return len(self._signals)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._signals[index]
        return LocalSignals(chosen) if isinstance(index, slice) else chosen


@dataclass(frozen=True)
class _Token:
    """The proof that a device has waited."""

    schedule: Schedule
    device: int


@dataclass
class _Run:
    """One run of a program.

    Attributes:
        schedule: its threads.
        allocations: what the devices have allocated in it: request, device and line of the first
            that did, and the result.
        counts: number of allocations per device.
        arrivals: number of barriers that each device has reached.
    """

    schedule: Schedule
    counts: list[int]
    arrivals: list[int]
    allocations: list[tuple[str, str, Any]] = field(default_factory=list)


class LocalDevices:
    """Devices of one process, made by `local`.

    Args:
        mesh: their axes.
        delays: as in `local`.
        timeout_s: as in `local`.

    Attributes:
        mesh: their axes.
        timeout_s: how long a wait may take.
    """

    def __init__(self, mesh: DeviceMesh, delays: int | None, timeout_s: float) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self._delays = delays
        self._lock = threading.Lock()
        self._num_tensors = self._num_signals = 0
        self._run: _Run | None = None

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.mesh.num_devices

    def symm_tensor(self, shape: Sequence[int], dtype: str | DType = "f32", *, name: str = "") -> LocalTensor:
        """Allocate a tensor of zeros on every device.

        In a program, all devices must make the same allocations in the same order.

        Args:
            shape: sizes of its dims, at least one.
            dtype: element type.
            name: its name in messages.

        Raises:
            ShapeError: an argument is invalid, or another device allocates something else.
        """
        sizes = tuple(_validate_shape.integer("symm_tensor", "a size", size, 0, 1 << 40) for size in shape)
        if not sizes:
            _validate_shape.invalid(
                "symm_tensor", "a tensor must have a dim", "none", "pass (1,) for a number"
            )
        kind = to_dtype(dtype)
        return self._allocate(
            f"symm_tensor({list(sizes)}, {kind.name!r})", lambda: self._new_tensor(sizes, kind, name)
        )

    def signals(self, count: int, *, name: str = "") -> LocalSignals:
        """Allocate signals with the value 0 on every device.

        In a program, all devices must make the same allocations in the same order.

        Args:
            count: how many.
            name: their name in messages.

        Raises:
            PlanError: an argument is invalid.
            ShapeError: another device allocates something else.
        """
        count = _validate.integer("signals", "the number of signals", count, 1, 1 << 20)
        return self._allocate(f"signals({count})", lambda: self._new_signals(count, name))

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a program on all devices, and wait until all have ended. What they have sent has then arrived.

        Args:
            program: a function in which the primitives act for the device that runs it.
            args, kwargs: its arguments, the same for every device. A symmetric tensor stands for the
                copy of the device that uses it.

        Returns:
            What the program returned on each device.

        Raises:
            TilewiseError: the first error that a primitive raised; the message names the device. The
                other devices stop at their next primitive.
            TaskFailed: the program failed in another way; its field `device` is the number of the
                device, and its cause is the program's error.
            CommError: all devices wait for one another.
        """
        count = self.num_devices
        schedule = Schedule(count, self._delays)
        results: list[Any] = [None] * count
        with self._lock:
            if self._run is not None:
                _validate.invalid(
                    "local", "devices run one program at a time", "another run", "wait for its end"
                )
            self._run = run = _Run(schedule, [0] * count, [0] * count)

        def run_on(device: int) -> None:
            with interpreting(_LocalDevice(self, run, device)):
                try:
                    schedule.begin(device)
                    results[device] = program(*args, **kwargs)
                except Released:
                    pass
                except BaseException as error:  # raised again by the caller of run
                    schedule.stop(device, error)
                finally:
                    schedule.end(device)

        try:
            _run_threads(run_on, schedule, count)
            if schedule.error is not None:
                raise self._failure(*schedule.error)
            schedule.finish()
            _require_equal_counts(run)
        finally:
            self._run = None
        return results

    def _device(self, primitive: str, rank: int) -> int:
        """The number of a device, checked."""
        return _validate.integer(primitive, "the number of a device", rank, 0, self.num_devices - 1)

    def _acting(self, primitive: str) -> int:
        """The number of the device that runs in this thread."""
        device = self._current()
        if device is None:
            _validate.invalid(
                primitive,
                "outside of a program, a device must be chosen",
                "none",
                f"call {primitive}(device)",
            )
        return device.number

    def _current(self) -> _LocalDevice | None:
        device = active_interpreter()
        return device if isinstance(device, _LocalDevice) and device.group is self else None

    def _allocate(self, request: str, make: Callable[[], _T]) -> _T:
        device = self._current()
        if device is not None:
            return device.allocate(request, make)
        with self._lock:
            return make()

    def _new_tensor(self, shape: tuple[int, ...], kind: DType, name: str) -> LocalTensor:
        self._num_tensors += 1
        copies = tuple(np.zeros(shape, kind.numpy) for _ in range(self.num_devices))
        memory = _Memory(self, name or f"tensor {self._num_tensors}", kind, copies)
        return LocalTensor(memory, None, 0, shape[0])

    def _new_signals(self, count: int, name: str) -> LocalSignals:
        self._num_signals += 1
        name = name or f"signals {self._num_signals}"
        return LocalSignals(
            tuple(
                LocalSignal(self, f"{name}[{n}]", tuple(_Word() for _ in range(self.num_devices)))
                for n in range(count)
            )
        )

    def _failure(self, device: int, error: BaseException) -> BaseException:
        """The error that `run` raises."""
        where = f"device {device} of {self.num_devices}"
        if device < 0 or not isinstance(error, Exception):
            return error
        if isinstance(error, TilewiseError):
            error.args = (f"{error} ({where})", *error.args[1:])
            return error
        failure = TaskFailed(
            f"[comm.local] a program must not fail; got {error!r} on {where}; see the error above",
            device=device,
        )
        failure.__cause__ = error
        return failure


class _LocalDevice:
    """Carries out the primitives for one device. Used by the device's thread only."""

    def __init__(self, group: LocalDevices, run: _Run, number: int) -> None:
        self.group, self.number = group, number
        self._run, self._schedule = run, run.schedule

    def allocate(self, request: str, make: Callable[[], _T]) -> _T:
        """The result of the device's next allocation, which the first device makes for all."""
        with self._step(request.split("(")[0]):
            line = self._schedule.line(self.number)
            n = self._run.counts[self.number]
            if n == len(self._run.allocations):
                self._run.allocations.append((request, f"device {self.number} at {line}", make()))
            first, where, result = self._run.allocations[n]
            if first != request:
                _validate_shape.invalid(
                    request.split("(")[0],
                    f"all devices must make the same allocations in the same order, here number {n + 1}",
                    f"{first} on {where}, and {request} on device {self.number} at {line}",
                    "allocate the same on every device",
                )
            self._run.counts[self.number] += 1
            return cast(_T, result)

    def rank(self, axis: str | None) -> int:
        return (
            self.number if axis is None else self.group.mesh.coordinate(self.number, self._axis("rank", axis))
        )

    def num_ranks(self, axis: str | None) -> int:
        return self.group.num_devices if axis is None else self.group.mesh.size(self._axis("num_ranks", axis))

    def symm_at(self, tensor: Any, rank: int, axis: str | None) -> LocalTensor:
        own = self._tensor("symm_at", "tensor", tensor)
        return replace(own, owner=self._device_at("symm_at", rank, axis))

    def _device_at(self, primitive: str, rank: int, axis: str | None) -> int:
        """The number of a device among all, from its number along an axis."""
        if axis is None:
            return self.group._device(primitive, rank)
        along = self.group.mesh.group(self.number, self._axis(primitive, axis))
        return along[_validate.integer(primitive, f"a number along {axis!r}", rank, 0, len(along) - 1)]

    def put(self, dst: Any, src: Any) -> None:
        with self._step("put"):
            target, pieces = self._copies("put", dst, src)
            self._schedule.send(self.number, target, pieces)

    def get(self, dst: Any, src: Any) -> None:
        with self._step("get"):
            array = self._own("get", "dst", dst)
            data = self._tensor("get", "src", src).numpy()
            _require_alike("get", array, data)
            array[...] = data

    def put_signal(self, dst: Any, src: Any, signal: Any, value: int, op: str) -> None:
        with self._step("put_signal"):
            target, pieces = self._copies("put_signal", dst, src)
            word = self._posted("put_signal", signal, target, op)
            value = _value("put_signal", value)
            self._schedule.send(self.number, target, pieces, lambda: word.apply(op, value))

    def notify(self, signal: Any, rank: int, value: int, op: str, scope: str, axis: str | None) -> None:
        with self._step("notify"):
            target = self._device_at("notify", rank, axis)
            if scope == "gpu" and target != self.number:
                _validate.invalid(
                    "notify",
                    'a device may post with scope "gpu" its own signals only',
                    f"a signal of device {target} from device {self.number}",
                    'pass scope="sys"',
                )
            word, value = self._posted("notify", signal, target, op), _value("notify", value)
            self._schedule.send(self.number, target, (), lambda: word.apply(op, value))

    def wait_all(self, signals: Any, value: Any, cmp: str, scope: str, timeout: float | None) -> _Token:
        primitive = "wait" if isinstance(signals, LocalSignal) else "wait_all"
        self._wait(primitive, signals, value, cmp, scope, (), timeout, needs_all=True)
        return _Token(self._schedule, self.number)

    def wait_any(
        self, signals: Any, value: Any, cmp: str, scope: str, skip: Iterable[int], timeout: float | None
    ) -> tuple[int, _Token]:
        reached = self._wait("wait_any", signals, value, cmp, scope, skip, timeout, needs_all=False)
        return reached[0], _Token(self._schedule, self.number)

    def wait_some(
        self, signals: Any, value: Any, cmp: str, scope: str, skip: Iterable[int], timeout: float | None
    ) -> tuple[list[int], _Token]:
        reached = self._wait("wait_some", signals, value, cmp, scope, skip, timeout, needs_all=False)
        return reached, _Token(self._schedule, self.number)

    def consume_token(self, tensor: Any, token: Any) -> LocalTensor:
        if token != _Token(self._schedule, self.number):
            _validate.invalid(
                "consume_token",
                "a token must be the result of a wait of the same device, in the same run",
                shown(token) if not isinstance(token, _Token) else f"one of device {token.device}",
                "pass what wait returned",
            )
        return self._tensor("consume_token", "tensor", tensor)

    def fence(self) -> None:
        with self._step("fence"):
            self._schedule.fence(self.number)

    def quiet(self) -> None:
        with self._step("quiet"):
            self._schedule.complete(self.number)

    def fetch_add(self, signal: Any, rank: int, value: int) -> int:
        with self._step("fetch_add"):
            target = self.group._device("fetch_add", rank)
            word = self._posted("fetch_add", signal, target, "add")
            self._schedule.complete_fenced(self.number, target)
            before = word.value
            word.apply("add", _value("fetch_add", value))
        return before

    def compare_swap(self, signal: Any, rank: int, expected: int, value: int) -> int:
        with self._step("compare_swap"):
            target = self.group._device("compare_swap", rank)
            word = self._posted("compare_swap", signal, target, "compare_swap")
            self._schedule.complete_fenced(self.number, target)
            before = word.value
            if before == _value("compare_swap", expected):
                word.apply("set", _value("compare_swap", value))
        return before

    def barrier(self) -> None:
        with self._step("barrier"):
            self._schedule.complete(self.number)
            arrivals = self._run.arrivals
            arrivals[self.number] += 1
            count = arrivals[self.number]
            self._schedule.wait(
                self.number,
                lambda: min(arrivals) >= count,
                lambda: f"{sum(a >= count for a in arrivals)} of {len(arrivals)} devices have arrived",
                self.group.timeout_s,
            )

    def kernel(self, name: str, arguments: dict[str, Any]) -> None:
        from tilewise.kernels.calls import problem_of
        from tilewise.kernels.isa import run_named  # loads the native module
        from tilewise.kernels.table import KERNELS

        with self._step("kernel"):
            pass
        problem = problem_of(KERNELS[name], arguments) if name in KERNELS else None
        if problem is not None:
            rule, got, advice = problem
            _validate_shape.invalid("kernel", rule, f"{got} for kernel {name!r}", advice)
        run_named(name, {key: self._argument(key, value) for key, value in arguments.items()})

    def tiles(self, count: int, first: int) -> Iterable[int]:
        count = _validate.integer("tiles", "the number of tiles", count, 0, 1 << 40)
        first = index(first)
        return ((first + n) % count for n in range(count))

    def _step(self, primitive: str) -> Any:
        return self._schedule.step(self.number, primitive)

    def _axis(self, primitive: str, axis: str) -> str:
        return _validate.choice(primitive, "an axis", axis, self.group.mesh.names)

    def _tensor(self, primitive: str, name: str, tensor: Any) -> LocalTensor:
        """A symmetric tensor of these devices, of a certain device."""
        checked = _validate.instance(primitive, name, tensor, LocalTensor, "pass a result of symm_tensor")
        if checked._memory.group is not self.group:
            _validate.invalid(
                primitive,
                f"{name} must be a tensor of the same devices",
                "one of others",
                "allocate it there",
            )
        return replace(checked, owner=self.number) if checked.owner is None else checked

    def _own(self, primitive: str, name: str, tensor: Any) -> NDArray[Any]:
        """The elements of a tensor that must be the calling device's."""
        checked = self._tensor(primitive, name, tensor)
        if checked.owner != self.number:
            _validate.invalid(
                primitive,
                f"{name} must be a tensor of the calling device {self.number}",
                f"the copy of {checked.name!r} on device {checked.owner}",
                "exchange the arguments, or copy it with get first",
            )
        return checked.numpy()

    def _copies(self, primitive: str, dst: Any, src: Any) -> tuple[int, list[Callable[[], None]]]:
        """The target of a put, and functions that each copy a part of it."""
        target = self._tensor(primitive, "dst", dst)
        array = target.numpy()
        data = src if isinstance(src, np.ndarray) else self._own(primitive, "src", src)
        _require_alike(primitive, array, data)
        data = data.copy()
        middle = len(data) // 2
        parts = [slice(0, middle), slice(middle, None)] if middle else [slice(None)]
        return target.owner or 0, [_copy_of(array[part], data[part]) for part in parts]

    def _posted(self, primitive: str, signal: Any, target: int, operator: str) -> _Word:
        """A signal of a device that this device changes."""
        checked = _validate.instance(primitive, "a signal", signal, LocalSignal, "pass signals[index]")
        word = checked.words[target]
        if word.operator not in ("", operator):
            _validate.invalid(
                primitive,
                f"signal {checked.name} of device {target} must be used with one operator",
                f"{operator} after {word.operator}",
                "use two signals",
            )
        if target != self.number and word.is_gpu:
            _invalid_gpu_wait(primitive, checked, target, self.number)
        word.operator = operator
        word.poster = self.number if target != self.number else word.poster
        return word

    def _wait(
        self,
        primitive: str,
        signals: Any,
        value: Any,
        cmp: str,
        scope: str,
        skip: Iterable[int],
        timeout: float | None,
        *,
        needs_all: bool,
    ) -> list[int]:
        """Wait for signals of this device.

        Returns:
            Indices of the signals that have reached their values.
        """
        is_one = isinstance(signals, LocalSignal)
        several = [signals] if is_one else _validate.sequence(primitive, "signals", signals, "signals")
        words = [
            _validate.instance(primitive, "a signal", signal, LocalSignal, "pass signals[index]").words[
                self.number
            ]
            for signal in several
        ]
        values = _values(primitive, value, len(several))
        skipped = set(skip)
        chosen = [n for n in range(len(several)) if n not in skipped]
        if not chosen and not needs_all:
            _validate.invalid(primitive, "a signal must remain to wait for", "none", "skip fewer signals")

        def has_reached(n: int) -> bool:
            return _COMPARE[cmp](words[n].value, values[n])

        def seen() -> str:
            missing = [n for n in chosen if not has_reached(n)]
            texts = [
                f"{several[n].name} {_SYMBOLS[cmp]} {values[n]}, and it is {words[n].value}"
                for n in missing[:_MAX_SHOWN]
            ]
            return ", ".join(texts) + (
                f", and {len(missing) - _MAX_SHOWN} more" * (len(missing) > _MAX_SHOWN)
            )

        with self._step(primitive):
            if scope == "gpu":
                for n in chosen:
                    words[n].is_gpu = True
                    if words[n].poster >= 0:
                        _invalid_gpu_wait(primitive, several[n], self.number, words[n].poster)
            timeout_s = _validate.seconds(primitive, "timeout", timeout)
            self._schedule.wait(
                self.number,
                lambda: (all if needs_all else any)(has_reached(n) for n in chosen),
                seen,
                self.group.timeout_s if timeout_s is None else timeout_s,
            )
            return [n for n in chosen if has_reached(n)]

    def _argument(self, name: str, value: Any) -> Any:
        """An operand's elements as a matrix; other arguments as they are."""
        if isinstance(value, LocalTensor):
            array = self._tensor("kernel", name, value).numpy()
            return array.reshape(-1, array.shape[-1]) if array.ndim != 1 else array.reshape(1, -1)
        if isinstance(value, list | tuple):
            return [self._argument(name, member) for member in value]
        return value


def _run_threads(run_on: Callable[[int], None], schedule: Schedule, count: int) -> None:
    """Run a function in one thread per device, and wait for all."""
    threads = [threading.Thread(target=run_on, args=(n,), name=f"tilewise device {n}") for n in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt, or the system has no more threads
        schedule.stop(-1, error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise


def _require_equal_counts(run: _Run) -> None:
    """Reject a run in which a device made fewer allocations than another."""
    fewest = min(run.counts)
    if fewest < len(run.allocations):
        request, where, _ = run.allocations[fewest]
        _validate_shape.invalid(
            "local",
            "all devices must make the same allocations",
            f"{request} on {where}, and not on device {run.counts.index(fewest)}",
            "allocate the same on every device",
        )


def _copy_of(array: NDArray[Any], data: NDArray[Any]) -> Callable[[], None]:
    def copy() -> None:
        array[...] = data

    return copy


def _require_alike(primitive: str, dst: NDArray[Any], src: NDArray[Any]) -> None:
    if (dst.shape, dst.dtype) != (src.shape, src.dtype):
        _validate_shape.invalid(
            primitive,
            "dst and src must have the same shape and dtype",
            f"{list(dst.shape)} {dst.dtype} and {list(src.shape)} {src.dtype}",
            "pass the same rows of equal tensors",
        )


def _value(primitive: str, value: Any) -> int:
    return _validate.integer(primitive, "the value of a signal", value, 0, _VALUES - 1)


def _values(primitive: str, value: Any, count: int) -> list[int]:
    """One expected value per signal."""
    if not isinstance(value, Sequence):
        return [_value(primitive, value)] * count
    if len(value) != count:
        _validate.invalid(
            primitive, "there must be one value per signal", f"{len(value)} for {count} signals", "correct it"
        )
    return [_value(primitive, v) for v in value]


def _invalid_gpu_wait(primitive: str, signal: LocalSignal, device: int, poster: int) -> None:
    _validate.invalid(
        primitive,
        f'a wait with scope "gpu" must be for a signal that only its own device posts, here {signal.name}',
        f"a wait of device {device} and a post by device {poster}",
        'wait with scope="sys"',
    )
