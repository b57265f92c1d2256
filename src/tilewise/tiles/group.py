"""`DeviceGroup`: devices without a model, for tile programs and collectives.

A group owns the memory, workers and signals of its devices. Symmetric tensors and signals are
allocated in it, at the same place on every device. The devices belong to this process, or to the
processes of a group that `tilewise launch` or `ProcessGroup` opened; the same program runs on both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.comm.group_executor import GroupExecutor
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import PlanError, ResourceError, ShapeError
from tilewise.core.limits import available_memory, num_cores
from tilewise.core.mesh import DeviceMesh
from tilewise.core.open_objects import note_open
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import Validator, shown
from tilewise.ir.program import Call, DeviceBinding, DeviceClass, LoweredTemplate, TileProgram
from tilewise.kernels.loading import Part, store_weight
from tilewise.kernels.packing import packed_elements, padded_columns, unpack_weight
from tilewise.observe.profile import Profile
from tilewise.plan.collectives.arrays import most_signals
from tilewise.plan.shapes import round_up
from tilewise.runtime import CallHandle, Executor, Program
from tilewise.runtime.calls import CallQueue
from tilewise.runtime.timelines import ExecutorTimeline
from tilewise.session.assemble import encode_program, open_devices
from tilewise.tiles.collectives import Collectives

__all__ = ["DeviceGroup", "Signals", "SymmTensor"]

Array = NDArray[Any]
_ALIGNMENT = 128  # bytes; no two tensors share a pair of cache lines
_MOST_WORKERS = 256
_MOST_BYTES = 1 << 46
_SCRATCH_BYTES = 64 << 20
_NUM_HANDLES = 1 << 16
_MOST_SENT = 256  # programs that workers keep
_DEFAULT_BYTES = 1 << 30
_validate = Validator("tiles", PlanError)


class DeviceGroup(Collectives):
    """Devices with symmetric memory, workers and signals; close it, or use it with `with`.

    It belongs to the process that made it. Threads may allocate at the same time; programs run one
    after another, in the order of their calls.

    Args:
        mesh: size per axis, for example `{"tp": 2}`, or a `DeviceMesh`.
        memory_bytes: symmetric memory per device. By default 1 GiB, or a device's share of half of
            the available memory if that is less. Pages that nothing writes use no memory.
        num_signals: signals per device.
        workers_per_device: threads per device; by default the cores divided by the devices.
        deadline_s: longest time without progress before a run is aborted.

    Raises:
        LayoutError: the mesh is invalid.
        PlanError: another argument is invalid, or there are fewer devices than processes.
        ResourceError: there is not enough memory.
    """

    def __init__(
        self,
        mesh: Mapping[str, int] | DeviceMesh,
        *,
        memory_bytes: int | None = None,
        num_signals: int = 4096,
        workers_per_device: int | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        super().__init__()
        self.mesh = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh(mesh)
        devices = self.mesh.num_devices
        if memory_bytes is None:
            memory_bytes = min(_DEFAULT_BYTES, available_memory() // (2 * devices))
        self.memory_bytes = _validate.integer("DeviceGroup", "memory_bytes", memory_bytes, 1, _MOST_BYTES)
        _validate.integer("DeviceGroup", "num_signals", num_signals, 1, 1 << 20)
        _validate.number("DeviceGroup", "deadline_s", deadline_s, 1e-3, 1e9)
        if workers_per_device is None:
            workers_per_device = max(1, num_cores() // devices)
        self.workers_per_device = _validate.integer(
            "DeviceGroup", "workers_per_device", workers_per_device, 1, _MOST_WORKERS
        )
        self._heap = _Heap(self.memory_bytes)
        self._first_signal = devices  # of collectives; the ones before are for barriers
        self._used_signals = devices + most_signals(devices)
        self._num_signals = num_signals + self._used_signals
        self._lock, self._queue = threading.RLock(), CallQueue("tilewise programs")
        # numbers of the programs that workers in other processes have, oldest first
        self._numbers: dict[Program, int] = {}
        self._num_sent = 0
        self.is_closed = False
        options = {
            "num_devices": devices,
            "workers_per_device": self.workers_per_device,
            "arena_bytes": [self.memory_bytes] * devices,
            "num_signals": self._num_signals,
            "num_handles": _NUM_HANDLES,
            "scratch_bytes": _SCRATCH_BYTES,
            "file_bytes": 0,
            "memory_limit_bytes": 0,
            "deadline_s": deadline_s,
        }
        self._executor = open_devices(options, _nothing(devices))
        self._timeline = ExecutorTimeline(self._executor, self.workers_per_device)
        note_open(self)

    # ---- symmetric memory ---------------------------------------------------------------------------------

    def symm_tensor(
        self, shape: int | Sequence[int], dtype: str = "f32", *, packed: bool = False
    ) -> SymmTensor:
        """Allocate a tensor on every device, at the same place, filled with zeros.

        Args:
            shape: sizes of its dims.
            dtype: `f32`, `bf16`, `i32` or `f64`.
            packed: stored in panels, as the weights `[n, k]` of `matmul` are. Its values are
                accessed by `read` and `write`.

        Raises:
            ShapeError: the shape or the dtype is invalid.
            ResourceError: the group's memory has no room.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if not sizes or not all(type(s) is int and 0 < s < 1 << 40 for s in sizes):
            raise ShapeError(
                f"[tiles.symm_tensor] a shape must be positive integers; got {shown(shape)}; pass for example (4, 8)"
            )
        kind = dtype_named(dtype)
        if packed and (len(sizes) != 2 or kind.name not in ("f32", "bf16")):
            raise ShapeError(
                f"[tiles.symm_tensor] a packed tensor must be 2-D, in f32 or bf16; got {kind}{list(sizes)}; "
                "drop `packed`"
            )
        count = packed_elements(*sizes) if packed else prod(sizes)
        with self._lock:
            self._require_open("symm_tensor")
            place = self._heap.take(count * kind.itemsize)
            if place is None:
                raise ResourceError(
                    "[tiles.symm_tensor] the devices' memory must have room; got "
                    f"{format_bytes(count * kind.itemsize)} for {format_bytes(self._heap.largest)} in one piece of "
                    f"{format_bytes(self.memory_bytes)}; pass a larger memory_bytes to DeviceGroup, or free tensors"
                )
            offset, is_fresh = place
            tensor = SymmTensor(self, sizes, kind.name, packed, offset, count * kind.itemsize)
            for device in () if is_fresh else range(self.mesh.num_devices):
                self._write(tensor, device, np.zeros(tensor.num_bytes, np.uint8))
        return tensor

    def signals(self, count: int) -> Signals:
        """Allocate signals on every device, which count from 0 in every program.

        Raises:
            ResourceError: the group has no more signals.
        """
        _validate.integer("signals", "count", count, 1, 1 << 20)
        with self._lock:
            self._require_open("signals")
            if self._used_signals + count > self._num_signals:
                raise ResourceError(
                    f"[tiles.signals] a group must have a signal for each use; got {count} more for "
                    f"{self._num_signals - self._used_signals} left; pass a larger num_signals to DeviceGroup"
                )
            first = self._used_signals
            self._used_signals += count
        return Signals(self, first, count)

    def _bytes(self, tensor: SymmTensor, device: int) -> NDArray[np.uint8]:
        return np.asarray(self._executor.buffer(device, tensor.offset, tensor.num_bytes))

    def _read(self, tensor: SymmTensor, device: int) -> NDArray[np.uint8]:
        """A copy of a device's bytes."""
        if self._executor.reaches(device):
            return self._bytes(tensor, device).copy()
        memory = np.empty(tensor.num_bytes, np.uint8)
        self._executor.move("read", device, tensor.offset, memory)
        return memory

    def _write(self, tensor: SymmTensor, device: int, content: NDArray[np.uint8]) -> None:
        if self._executor.reaches(device):
            self._bytes(tensor, device)[:] = content
        else:
            self._executor.move("write", device, tensor.offset, content)

    # ---- programs -----------------------------------------------------------------------------------------

    def run_program(self, native: Program, program: TileProgram) -> None:
        """Run a program on all devices, and wait for its end.

        Args:
            native: the program as native code executes it.
            program: the same as data, for other processes.

        Raises:
            TaskFailed: a task failed.
            PeerLost, CommTimeout: a process has ended, or is late.
        """
        with self._queue.turn():
            self._run(native, program)

    def start_program(self, native: Program, program: TileProgram, result: object = None) -> CallHandle:
        """Run a program in the background, after all programs that were called before.

        Args:
            native: as in `run_program`.
            program: as in `run_program`.
            result: what the handle's `result` returns.
        """
        self._require_open("start")
        return self._queue.start(CallHandle("a program", lambda: self._run(native, program), result=result))

    def _run(self, native: Program, program: TileProgram) -> None:
        self._require_open("run")
        executor = self._executor
        number = 0 if isinstance(executor, Executor) else self._number_of(executor, native, program)
        self._timeline.run("run", lambda: executor.run(native, (), "run", None, number))

    def _number_of(self, executor: GroupExecutor, native: Program, program: TileProgram) -> int:
        """The number that workers in other processes have for a program, which they get first."""
        number = self._numbers.get(native)
        if number is None:
            number = (
                self._num_sent % _MOST_SENT + 1
            )  # the program with which the group was opened has number 0
            if len(self._numbers) == _MOST_SENT:
                del self._numbers[next(iter(self._numbers))]  # the oldest, which had this number
            executor.load(number, encode_program(program))
            self._numbers[native] = number
            self._num_sent += 1
        return number

    def trace(self, program: Callable[..., object], *arguments: object) -> Profile:
        """Call a program, and return what the devices did: transfers and kernels of all devices and
        hosts on one clock, how much of the transfers was hidden behind computation, what workers
        waited for, and the critical path.

        Args:
            program: a tile program, or a function that runs programs; the last one is shown.
            arguments: its arguments.

        Returns:
            A profile; `save` writes a page, `perfetto` a file for Perfetto.
        """
        with self._lock:
            self._require_open("trace")
            self._timeline.trace(True)
            try:
                program(*arguments)
                name = getattr(program, "__name__", "a program")
                return Profile(self._timeline.read(), f"One run of {name}")
            finally:
                self._timeline.trace(False)

    def transfers(self) -> dict[str, list[int]]:
        """Elements that each device has read from or written to other devices' memory, by label."""
        return dict(self._executor.transfers())

    def _require_open(self, call: str) -> None:
        if self.is_closed:
            _validate.invalid(call, "the group must be open", "a closed one", "open another")

    def close(self) -> None:
        """Wait for programs that were started, and stop the devices' workers. Arrays of
        `SymmTensor.numpy` stay valid.
        """
        with self._lock, self._queue.turn():
            if not self.is_closed:
                self.is_closed = True
                self._timeline.close()
                self._executor.close()
        self._queue.close()

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DeviceGroup({self.mesh})"


@dataclass(frozen=True, eq=False)
class SymmTensor:
    """A tensor that every device of a group has, at the same place of its memory.

    Attributes:
        group: the devices.
        shape: sizes of its dims.
        dtype: name of the element type.
        is_packed: whether it is stored in panels.
        offset: first byte in every device's memory.
        num_bytes: bytes on each device.
    """

    group: DeviceGroup
    shape: tuple[int, ...]
    dtype: str
    is_packed: bool
    offset: int
    num_bytes: int

    def numpy(self, device: int) -> Array:
        """A device's copy, as a writable array over the device's memory, which programs read and
        write. It can be passed on by DLPack, which for bf16 needs `.view(np.int16)`. It stays valid
        when the group is closed.

        Raises:
            PlanError: there is no such device, the device is on another host, or the tensor is
                packed; `read` and `write` copy.
        """
        self._check("numpy", device)
        if self.is_packed or not self.group._executor.reaches(device):
            got = "a packed tensor" if self.is_packed else "a device of another host"
            _validate.invalid(
                "numpy", "only plain tensors on this host have arrays", got, "use read and write"
            )
        return self.group._bytes(self, device).view(dtype_named(self.dtype).numpy).reshape(self.shape)

    def read(self, device: int) -> Array:
        """A copy of a device's copy.

        Raises:
            PlanError: there is no such device, or the group is closed.
        """
        self._check("read", device)
        flat = self.group._read(self, device).view(dtype_named(self.dtype).numpy)
        return unpack_weight(flat, *self.shape) if self.is_packed else flat.reshape(self.shape)

    def write(self, value: Any, device: int | None = None) -> None:
        """Write a device's copy, or with None the copies of all devices.

        Args:
            value: an array of the tensor's shape; anything with DLPack or that NumPy accepts. For bf16,
                16-bit integers are bit patterns, because NumPy's DLPack has no bf16:
                `x.write(t.view(torch.int16))`.
            device: the device.

        Raises:
            ShapeError: the value has another shape.
            PlanError: there is no such device, or the group is closed.
        """
        array = _array_of(value)
        if self.dtype == "bf16" and array.dtype in (np.int16, np.uint16):
            array = array.view(dtype_named("bf16").numpy)
        if array.shape != self.shape:
            raise ShapeError(
                f"[tiles.write] a value must have the tensor's shape; got {list(array.shape)} for "
                f"{list(self.shape)}; reshape it"
            )
        content = np.zeros(self.num_bytes, np.uint8)
        if self.is_packed:
            store_weight(array, Part(content, self.dtype, True, self.shape[0], self.shape[1]))
        else:
            content.view(dtype_named(self.dtype).numpy)[:] = array.reshape(-1)
        devices = range(self.group.mesh.num_devices) if device is None else (device,)
        for each in devices:
            self._check("write", each)
            self.group._write(self, each, content)

    def free(self) -> None:
        """Give the memory back to the group. Arrays and programs must not use it afterwards."""
        with self.group._lock:
            self.group._heap.give_back(self.offset, self.num_bytes)

    @property
    def stride(self) -> int:
        """Elements from one row to the next."""
        return padded_columns(self.shape[1]) if self.is_packed else prod(self.shape[1:])

    def _check(self, call: str, device: int) -> None:
        self.group._require_open(call)
        _validate.integer(call, "device", device, 0, self.group.mesh.num_devices - 1)

    def __repr__(self) -> str:
        return f"SymmTensor({self.dtype}{list(self.shape)}{', packed' if self.is_packed else ''})"


def _array_of(value: Any) -> Array:
    """An array over the memory of a value that has DLPack; otherwise what NumPy makes of it."""
    if not hasattr(value, "__dlpack__") or isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ShapeError(
            f"[tiles.write] NumPy must know the tensor's dtype and device; got {error}; pass a CPU tensor, and bf16 as "
            "16-bit integers: t.view(torch.int16)"
        ) from None


@dataclass(frozen=True, eq=False)
class Signals:
    """Signals that every device of a group has. A program gets them as an argument, and names one
    by its index.
    """

    group: DeviceGroup
    first: int
    count: int

    def __len__(self) -> int:
        return self.count


class _Heap:
    """Free ranges of a device's memory, in order."""

    def __init__(self, num_bytes: int) -> None:
        self._free = [(0, num_bytes // _ALIGNMENT * _ALIGNMENT)]
        self._used = 0  # bytes from here on have never been used

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((end - begin for begin, end in self._free), default=0)

    def take(self, num_bytes: int) -> tuple[int, bool] | None:
        """The first byte of a range, and whether no earlier range had its bytes; None if no free
        range is large enough.
        """
        size = round_up(num_bytes, _ALIGNMENT)
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[i : i + 1] = [(begin + size, end)] if begin + size < end else []
                is_fresh = begin >= self._used
                self._used = max(self._used, begin + size)
                return begin, is_fresh
        return None

    def give_back(self, begin: int, num_bytes: int) -> None:
        """Free a range again."""
        end = begin + round_up(num_bytes, _ALIGNMENT)
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (begin, end)]):
            if merged and merged[-1][1] >= low:
                merged[-1] = merged[-1][0], max(high, merged[-1][1])
            else:
                merged.append((low, high))
        self._free = merged


def _nothing(num_devices: int) -> TileProgram:
    """A program without tasks, with which executors of other processes begin."""
    template = LoweredTemplate("nothing", (), (), ())
    only = DeviceClass((template,), (), {}, {"run": (Call(0, ()),)})
    return TileProgram((only,), tuple(DeviceBinding(0) for _ in range(num_devices)))
