"""`Runtime`: accepts tasks on buffers, and orders and runs them.

A `Runtime` owns one native runtime with its kernels, registered buffers and scopes (brackets around
submissions; memory allocated in a scope ends with it). Tasks that access the same data run in the
order of submission. Mistakes are reported before anything is submitted. docs/runtime.md explains
the model, lifetimes and sizes.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tilewise._native.tasks import OpenRuntime, Operand, Param
from tilewise.core.errors import ConfigError, PeerLost, TaskFailed
from tilewise.core.limits import num_cores
from tilewise.core.open_objects import note_open
from tilewise.core.validation import Validator
from tilewise.ir.policy import TaskExecutionHints
from tilewise.observe.stats import RuntimeStats
from tilewise.runtime.buffers import MAX_BYTES, Buffer, Region, dtype_of, shape_of
from tilewise.runtime.events import Event
from tilewise.runtime.extras import check_owner, extras_of, own_buffer
from tilewise.runtime.failures import forget_exceptions
from tilewise.runtime.handles import TaskHandle
from tilewise.runtime.kernels import Kernel, KernelTable, WorkerType, type_masks
from tilewise.runtime.python_tasks import PythonTask
from tilewise.runtime.recordings import Recording
from tilewise.runtime.registry import Registry
from tilewise.runtime.tracing import GraphLog, Tracing
from tilewise.runtime.views import views_of

__all__ = ["Runtime"]

_validate = Validator("runtime")

MAX_WORKERS = 256
MAX_COUNT = (1 << 32) - 1

Array = NDArray[Any]
_EXIT_PATIENCE_S = 10.0  # at exit, how long to wait for the next task to end
_open: set[Runtime] = set()  # closed at exit: threads of a forgotten runtime must not outlive the interpreter


class Runtime:
    """A task runtime with its workers.

    `with Runtime() as rt:` closes the runtime at the end of the block. The end of the block raises
    the first failure of this thread's tasks that was not reported yet; if the block raises, tasks
    that have not started are cancelled.

    Args:
        num_workers: number of threads that run tasks. None stands for processors - 1, but at least
            1 (submitters help while they wait). With 0, only waiting threads run tasks.
        window: maximum number of tasks of one thread that are submitted and not yet complete; a
            power of two.
        heap_bytes: memory for outputs that the runtime allocates; pages cost nothing until they are
            used.
        max_submitters: maximum number of threads that submit at the same time.
        max_handles: maximum number of buffers at a time.
        max_regions: maximum number of distinct regions of buffers at a time.
        max_events: maximum number of events at a time.
        worker_types: per worker, the types that it serves; None if every worker serves every type.
        pin: pin worker w to processor w + 1.
        shared_path: a file to create, if the workers are in another process
            (`tilewise.runtime.workers`).
        peer_timeout_s: seconds to wait for this other process.

    Any thread may submit and wait; each submitting thread has its own slots and scopes. A runtime
    stays open until it is closed, at the latest when the interpreter ends.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        window: int = 1024,
        heap_bytes: int = 64 << 20,
        max_submitters: int = 16,
        max_handles: int = 1 << 15,
        max_regions: int = 4096,
        max_events: int = 1024,
        worker_types: Sequence[Iterable[WorkerType]] | None = None,
        pin: bool = False,
        shared_path: str | Path | None = None,
        peer_timeout_s: float = 10.0,
    ) -> None:
        masks = None if worker_types is None else type_masks(worker_types)
        if num_workers is None:
            num_workers = max(1, num_cores() - 1) if masks is None else len(masks)
        self.num_workers = _validate.integer("Runtime", "num_workers", num_workers, 0, MAX_WORKERS)
        if masks is not None and len(masks) != num_workers:
            _validate.invalid(
                "Runtime",
                "worker_types must name every worker",
                f"{len(masks)} entries for {num_workers} workers",
                "correct one of them",
            )
        counts = {
            "window": window, "max_submitters": max_submitters, "max_handles": max_handles, "max_regions": max_regions,
            "max_events": max_events,
        }  # fmt: skip
        for name, count in counts.items():  # the native side checks the rest
            _validate.integer("Runtime", name, count, 1, MAX_COUNT)
        _validate.integer("Runtime", "heap_bytes", heap_bytes, 1, MAX_BYTES)
        path = None if shared_path is None else _path("Runtime", shared_path)
        self._native = OpenRuntime(
            TaskHandle,
            num_workers=self.num_workers,
            **counts,
            heap_bytes=heap_bytes,
            worker_types=masks or [],
            pin=bool(pin),
            shared_path=path,
            peer_timeout_s=_validate.seconds("Runtime", "peer_timeout_s", peer_timeout_s, is_positive=True),
        )
        native: Any = self._native
        self._native_submit: Callable[..., TaskHandle] = native.submit
        self._native_submit_python: Callable[..., TaskHandle] = native.submit_python
        self._kernels = KernelTable(self._native, path is not None)
        self._empty = Kernel(self._native, -1, "empty", None, False)
        self._registry = Registry(self._native)
        self._recording_threads: set[int] = set()
        self._native.keep_alive = (self._registry, self._kernels)
        _open.add(self)
        note_open(self)

    def close(self) -> None:
        """Wait for every task and stop the workers. Failures of tasks that nothing waited for are
        not raised here.

        Arrays in the runtime's own memory stay readable, but their values are only valid until
        their scope ends. The workers end when the last of these arrays is dropped. Must not be
        called from inside a task.
        """
        self._close(cancels=False)

    def _close(self, cancels: bool) -> None:
        self._native.close(cancels)
        _open.discard(self)
        if not _open:
            forget_exceptions()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_reported = self._native.has_reported_failure
        has_ended = False
        try:
            if error is None and self._native.is_open:
                self._native.wait_all(None)
            has_ended = error is None
        except (TaskFailed, CancelledError, PeerLost):
            has_ended = True
            if not is_reported:  # otherwise the program has seen a failure and continued
                raise
        finally:  # after an error, such as Ctrl-C, no further task starts
            self._close(cancels=not has_ended)

    # Kernels.

    def kernel(
        self, kernel: object = None, *, submits: bool = False, name: str | None = None, views: bool = False
    ) -> Any:
        """A kernel of this runtime; also a decorator: `@rt.kernel`.

        Args:
            kernel: a built-in name ("copy", "fill", "sum_f32", ...) or an exported name of a loaded
                library; a numba `cfunc`; a ctypes function pointer; an address; or a Python
                callable (slower, one at a time: docs/runtime_numba.md). Native kernels have the
                type int (*)(void* const* buffers, const uint64_t* scalars).
            submits: whether a native kernel may submit tasks or wait. Python callables always may.
            name: name of the kernel in traces.
            views: for native kernels: whether `buffers[p]` is the address of a `pto_view` (data,
                shape, strides, element type) instead of the data's address; see
                docs/runtime_native.md.

        Returns:
            The kernel for `submit`.
        """
        if kernel is None:
            return lambda function: self._kernels.find(function, submits, name, views)
        return self._kernels.find(kernel, submits, name, views)

    def load_library(self, path: str | Path) -> None:
        """Load a shared library whose exported functions are kernels by name."""
        self._native.load_library(_path("load_library", path))

    # Buffers.

    def register(self, source: object) -> Buffer:
        """Register an array, or any object with the buffer protocol, as a buffer.

        Args:
            source: contiguous memory, on which tasks work in place. If it is read-only, tasks can
                only read it. It is kept alive until `unregister`.

        Raises:
            ConfigError: the memory is not contiguous, is empty, or is already registered (tasks on
                two handles of the same memory would not be ordered).
        """
        return self._registry.add(source)

    def unregister(self, buffer: Buffer, timeout: float | None = None) -> None:
        """Wait for the buffer's tasks, then unregister it and release its memory.

        Raises:
            TimeoutError: its tasks still run after `timeout` seconds; the buffer stays registered.
        """
        own_buffer(self._native, buffer, "unregister")
        self._registry.remove(buffer, timeout)

    @contextmanager
    def registered(self, *sources: object) -> Iterator[tuple[Buffer, ...]]:
        """Registers buffers for a `with` block, and unregisters them at its end."""
        buffers: list[Buffer] = []
        try:
            for source in sources:
                buffers.append(self.register(source))
            yield tuple(buffers)
        except (KeyboardInterrupt, SystemExit):  # must not wait: the buffers stay until the runtime is closed
            buffers.clear()
            raise
        finally:
            for buffer in buffers if self._native.is_open else ():
                self.unregister(buffer)

    def alloc(self, shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> Buffer:
        """A buffer in the runtime's own memory, valid until the scope ends. Its initial values are
        arbitrary.
        """
        sizes = shape_of("alloc", shape)
        kind = dtype_of("alloc", dtype, sizes)
        handle = self._native.alloc(math.prod(sizes) * kind.itemsize)
        return Buffer(self._native, handle, None, sizes, kind)

    def freeze(self, buffer: Buffer, frozen: bool = True) -> None:
        """Freeze a buffer, for example a weight: from now on it is only read, and its readers are
        not tracked. Waits for its writers.
        """
        own_buffer(self._native, buffer, "freeze")
        if not frozen:
            _check_writeable(buffer, "freeze")
        self._native.freeze(buffer.handle, bool(frozen))

    def read(self, buffer: Buffer | Region, timeout: float | None = None) -> Array:
        """Wait for the writers of a buffer or of a region, then return its value as a read-only
        array that shares its memory.

        For a region, only tasks that write some of its bytes are waited for, and only their
        failures are raised.

        Raises:
            TaskFailed: the task that should have written it failed.
            TimeoutError: a writer still runs after `timeout` seconds.
        """
        check_owner(self._native, buffer, buffer.native, "read")
        self._native.read(buffer, timeout)
        array: Array = buffer.array.view()
        array.flags.writeable = False
        return array

    def write(self, buffer: Buffer | Region, timeout: float | None = None) -> Array:
        """Wait for the readers and writers of a buffer or of a region, then return its array, which
        the caller may write until the next submission on it.

        The whole buffer or region counts as written: failures of earlier writers of these bytes
        have no further effect.
        """
        check_owner(self._native, buffer, buffer.native, "write")
        _check_writeable(buffer, "write")
        self._native.write(buffer, timeout)
        return buffer.array

    # Tasks.

    def scope_begin(self) -> None:
        """Begin a scope of this thread. Memory that the runtime allocates in the scope is valid
        until the scope ends.
        """
        self._native.scope_begin()

    def scope_end(self) -> None:
        """End this thread's innermost scope. Does not wait: the scope's memory is freed when the
        last task that uses it is complete.
        """
        self._native.scope_end()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A scope as a `with` block."""
        self._native.scope_begin()
        try:
            yield
        finally:
            if self._native.is_open:  # otherwise its scopes have ended, or belong to the parent process
                self._native.scope_end()

    def submit(
        self,
        kernel: object,
        params: Sequence[Param] = (),
        *,
        scalars: Sequence[Any] = (),
        worker_type: WorkerType = WorkerType.VECTOR,
        after: Sequence[TaskHandle] | None = None,
        wait_for: Sequence[tuple[Event, int]] | None = None,
        hints: TaskExecutionHints | None = None,
        predicate: Buffer | None = None,
        name: str | None = None,
        deadline: float | None = None,
    ) -> TaskHandle:
        """Submit a task. It runs when the earlier tasks that access its data have ended.

        Args:
            kernel: the result of `Runtime.kernel`, or whatever that function accepts as `kernel`.
                None for an empty task, which only orders other tasks.
            params: `Input`, `Output`, `InOut`, `Commute`, `Reduce`, `NoDep`; at most 24.
            scalars: for a native kernel, at most 16 values of 64 bits: integers in two's
                complement, floats as the bits of a double. A Python kernel gets any objects
                unchanged.
            worker_type: which workers may run it (default: `WorkerType.VECTOR`).
            after: tasks that must end first, in addition to those that follow from the data.
            wait_for: events and the values that they must have reached.
            hints: priority, worker and so on.
            predicate: a buffer that begins with a uint32. If it is 0 when the task is due, the
                kernel is skipped.
            name: its name in traces, graphs and errors; at most 63 bytes.
            deadline: seconds from now. If the task has not started by then, it fails, and so do
                tasks that depend on it. A running kernel can ask `should_stop` whether the deadline
                has passed.

        Returns:
            The task's handle. Blocks while the window is full; other Python threads run meanwhile.

        Raises:
            ConfigError: an argument is invalid; nothing was submitted.
            ResourceError: no running task can free what this task needs. The message names the
                resource and the option to change.
        """
        if type(kernel) is not Kernel or kernel.native is not self._native:
            kernel = self._empty if kernel is None else self._kernels.find(kernel, False, None)
        extras = None
        asks_more = after is not None or wait_for is not None or hints is not None or predicate is not None
        if asks_more or name is not None or deadline is not None or kernel.has_views:
            views = views_of(params) if kernel.has_views else []
            extras = extras_of(self._native, after, wait_for, hints, predicate, name, deadline, views)
        if kernel.is_python:
            return self._submit_python(kernel, params, scalars, worker_type, extras)
        return self._native_submit(kernel.id, worker_type, params, scalars, extras)

    def task_complete(self, task: TaskHandle, status: int = 0) -> None:
        """End a task whose kernel returned `LATER`. A status of 0 means that it succeeded; any
        other status means that it failed. May be called once, from any thread.
        """
        check_owner(self._native, task, task.native, "task_complete")
        self._native.task_complete(
            task.id, _validate.integer("task_complete", "status", status, -(1 << 31), (1 << 31) - 1)
        )

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait for every task that this thread submitted (inside a task: its children).

        Raises:
            TaskFailed, CancelledError: a task failed or was cancelled since the last `wait_all`.
                The first such failure is raised, once.
            TimeoutError: some tasks still run after `timeout` seconds.
        """
        self._native.wait_all(timeout)

    def cancel_all(self) -> None:
        """Cancel all submitted tasks that have not started, including those that wait for events."""
        self._native.cancel_all()

    def event(self) -> Event:
        """A new event; see `submit(wait_for=...)`."""
        return Event(self._native)

    # Recordings, orchestrations, observation.

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the tasks that this thread submits in the block, while they run."""
        recording = Recording(self._native)
        recording._begin()
        self._recording_threads.add(threading.get_ident())
        try:
            yield recording
        except BaseException:
            self._recording_threads.discard(threading.get_ident())
            if self._native.is_open:
                with suppress(ConfigError):  # the runtime may have ended it; the current error says why
                    recording._end()
            raise
        self._recording_threads.discard(threading.get_ident())
        if self._native.is_open:
            recording._end()

    def run_orchestration(self, path: str | Path, name: str, args: Sequence[Any] = ()) -> None:
        """Run `int name(PTORuntime*, const uint64_t* args)` of a shared library in this thread, and wait for its tasks.

        Args:
            path: the library.
            name: the function, exported with C linkage.
            args: integers, floats (bits of a double), buffers (their handles), arrays (their addresses).
        """
        values = [_argument(self._native, value) for value in args]
        self._native.run_orchestration(_path("run_orchestration", path), name, values)

    def stats(self) -> RuntimeStats:
        """Counters and high-water marks; `stats().advice()` says how to size the runtime."""
        return RuntimeStats(**self._native.stats())

    def trace(
        self,
        *paths: str | Path,
        graph: str | Path | None = None,
        max_records_per_thread: int = 100_000,
    ) -> Tracing:
        """A `with` block whose tasks are traced. Afterwards, the result's `.trace` has the records,
        and the files are written.

        Args:
            paths: files to write, any number: a report on one page if the name ends in `.html`,
                otherwise JSON for Perfetto.
            graph: a file for the dependency graph of the same run, as `Runtime.graph` writes it.
                The trace then has the predecessors of each task, and its critical path follows
                them.
            max_records_per_thread: maximum number of records per thread. The newest records are
                kept.
        """
        return Tracing(self._native, self.num_workers, paths, max_records_per_thread, graph)

    def graph(self, *paths: str | Path) -> GraphLog:
        """A `with` block whose tasks' dependency graph is recorded. Afterwards, the result's
        `.graph` has the graph, and the files are written.

        Args:
            paths: files to write, any number: a picture if the name ends in `.html`, otherwise
                JSON.
        """
        return GraphLog(self._native, paths)

    def _submit_python(
        self,
        kernel: Kernel,
        params: Sequence[Param],
        scalars: Sequence[Any],
        worker_type: WorkerType,
        extras: object,
    ) -> TaskHandle:
        if threading.get_ident() in self._recording_threads:
            _validate.invalid(
                "submit",
                "a recording must not contain Python kernels",
                f"{kernel!r}",
                "compile it, or submit it outside the block",
            )
        params = tuple(params)
        function: Any = kernel.function
        record = PythonTask(self._native, function, params, scalars)
        return self._native_submit_python(kernel.id, worker_type, params, record, extras)


def _path(call: str, path: str | Path) -> str:
    """A path as text. A path with a zero character is invalid, because text in C would end there."""
    _validate.path(call, "a path", path)
    return os.fspath(path)


def _check_writeable(buffer: Buffer | Region, call: str) -> None:
    if not buffer.array.flags.writeable:
        _validate.invalid(
            call, "read-only memory must only be read", "the buffer of a read-only array", "register a copy"
        )


def _argument(native: OpenRuntime, value: Any) -> Any:
    if isinstance(value, Operand):  # a handle names the whole buffer, and may be equal to another runtime's
        own_buffer(native, value, "run_orchestration")
        return value.handle
    return value.ctypes.data if isinstance(value, np.ndarray) else value


os.register_at_fork(after_in_child=_open.clear)  # a forked child has no threads to close


@atexit.register
def _close_all() -> None:
    has_ended = [runtime._native.close_at_exit(_EXIT_PATIENCE_S) for runtime in list(_open)]
    if all(has_ended):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # they may be closed or None
            stream.flush()
    os._exit(1)  # a running kernel must not outlive the interpreter
