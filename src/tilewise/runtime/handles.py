"""`TaskHandle`: a submitted task. A handle waits for the end of its task, and gives its failure and
its outputs.

Dropping a handle never blocks and never cancels the task; the runtime then forgets the task's
error. Only `Runtime.submit` creates handles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from tilewise._native.tasks import Task
from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.runtime.buffers import Buffer
from tilewise.runtime.params import NewOutput, Param

__all__ = ["TaskHandle"]


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
        if error is None:
            self.wait()
        else:  # the block's own error is raised
            with suppress(TaskFailed, CancelledError, ConfigError):
                self.cancel()
                self.wait()

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_complete():
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()
            self.notify(lambda: wake_loop(loop, ended))
            try:
                yield from ended
            except asyncio.CancelledError:
                with suppress(ConfigError):  # the runtime has been closed
                    self.cancel()
                raise
        return self.result(0)

    def __repr__(self) -> str:
        return f"TaskHandle({self.id})"


def wake_loop(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Called by the thread that completed the task."""
    with suppress(RuntimeError):  # the loop has been closed: no coroutine waits any more
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))
