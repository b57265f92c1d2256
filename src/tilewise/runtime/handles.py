"""`Handle`: the protocol of everything that runs in the background, and `TaskHandle`: a submitted
task.

A handle waits for the end of a task or call, and gives its failure and its result. `TaskHandle` is
a class of native code, which cannot have a second base class; so the protocol is structural, and
what its classes share is functions. Dropping a handle never blocks and never cancels; the runtime
then forgets a task's error. Only `Runtime.submit` creates handles of tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from tilewise._native.tasks import Task
from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.runtime.buffers import Buffer
from tilewise.runtime.params import NewOutput, Param

__all__ = ["Handle", "TaskHandle"]


@runtime_checkable
class Handle(Protocol):
    """A task or a call in the background: `TaskHandle` and `CallHandle`. A `TaskGroup` accepts any."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raise the failure, CancelledError, or TimeoutError after `timeout` seconds."""

    def is_complete(self) -> bool:
        """Whether it has ended, successfully or not. Never blocks."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait, then return the result."""

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, then return why it failed or was cancelled; None if it succeeded."""

    def notify(self, callback: Callable[[], object]) -> None:
        """Call a function once at the end, on the thread that ended it; at once if it has ended."""

    def cancel(self) -> None:
        """Skip it if it has not started."""

    def detach(self) -> None:
        """State that no thread will wait for it."""

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait without blocking a thread, then return the result. A cancelled wait cancels it."""


class TaskHandle(Task):
    """A submitted task.

    Several threads may use it. `with handle:` waits at the end of the block, and cancels the task
    first if the block raises. `await handle` waits without blocking a thread, and cancels the task
    if the wait is cancelled. Waiting for a cancelled task raises
    `concurrent.futures.CancelledError`. Waiting for a task that failed, or whose predecessor
    failed, raises `TaskFailed`.
    """

    _buffers: tuple[Buffer, ...] = ()

    def _take_outputs(self, params: Sequence[Param]) -> None:
        """Make buffers of the requested shapes. `submit` calls this if the runtime allocated
        outputs.
        """
        looks = [param.target for param in params if isinstance(param.target, NewOutput)]
        native: Any = self.native
        handles: Any = self.output_handles
        self._buffers = tuple(
            Buffer(native, handle, None, look.shape, look.dtype) for handle, look in zip(handles, looks)
        )

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """The outputs that the runtime allocated, in order of the parameters. They are valid until
        their scope ends.
        """
        return self._buffers

    def result(self, timeout: float | None = None) -> NDArray[Any] | tuple[NDArray[Any], ...] | None:
        """Wait, then return the outputs that the runtime allocated.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            A read-only array for one output, a tuple of arrays for several, or None for no output.
            The arrays have the task's values until the scope of the task ends. Copy them to keep
            the values.

        Raises:
            TaskFailed, CancelledError, TimeoutError: see `wait`.
        """
        self.wait(timeout)
        arrays = tuple(buffer.array for buffer in self._buffers)
        for array in arrays:
            array.flags.writeable = False
        return arrays if len(arrays) > 1 else arrays[0] if arrays else None

    def exception(self, timeout: float | None = None) -> TaskFailed | CancelledError | None:
        """Wait, then return why the task failed; None if it succeeded.

        Raises:
            TimeoutError: the task still runs or waits.
        """
        try:
            self.wait(timeout)
        except (TaskFailed, CancelledError) as error:
            return error
        return None

    def __enter__(self) -> TaskHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        leave_block(self, error)

    def __await__(self) -> Generator[Any, None, Any]:
        return await_handle(self)

    def __repr__(self) -> str:
        return f"TaskHandle({self.id})"


def leave_block(handle: Handle, error: BaseException | None) -> None:
    """The end of a handle's `with` block: wait, and cancel first if the block raised `error`."""
    if error is None:
        handle.wait()
        return
    with suppress(Exception):  # the block's own error is raised
        handle.cancel()
        handle.wait()


def await_handle(handle: Handle) -> Generator[Any, None, Any]:
    """Wait for a handle in a coroutine, then return its result."""
    if not handle.is_complete():
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        handle.notify(lambda: wake_loop(loop, ended))
        try:
            yield from ended
        except asyncio.CancelledError:
            with suppress(ConfigError):  # the runtime has been closed
                handle.cancel()
            raise
    return handle.result(0)


def wake_loop(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Called by the thread that completed the task."""
    with suppress(RuntimeError):  # the loop has been closed: no coroutine waits any more
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))
