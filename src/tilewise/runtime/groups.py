"""`TaskGroup`: waits for all or any of its tasks, also in an asyncio loop.

A group is a list of handles with a lock, so several threads may add tasks and wait. Iterating over
it returns the tasks in the order of addition, any number of times. `wait_any`, `as_completed` and
`async for` return each task once, after it has ended. A group has no native resources, so dropping
it never blocks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import Any

from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.core.validation import Validator
from tilewise.runtime.handles import TaskHandle, wake_loop

__all__ = ["TaskGroup"]

_validate = Validator("runtime")

SLICE_S = 0.05  # how long a wait with a deadline may miss tasks that another thread adds to the group


class TaskGroup:
    """Tasks that are waited for together. `len` is the number of tasks that were added. Iterating
    returns them in the order of addition.

    `with group:` waits for all at the end of the block, and cancels tasks that have not started if
    the block raises. `async with group:` does the same without blocking the thread, also if the
    asyncio task is cancelled there.
    """

    def __init__(self, tasks: Iterable[TaskHandle] = ()) -> None:
        self._lock = threading.Lock()
        self._tasks: list[TaskHandle] = []
        self._pending: dict[int, TaskHandle] = {}  # not returned yet by `wait_any` or `as_completed`
        for task in tasks:
            self.add(task)

    def add(self, task: TaskHandle) -> TaskHandle:
        """Add a task, and return it. All tasks of a group must belong to one runtime."""
        with self._lock:
            self._check_runtime(task)
            self._pending[task.id] = task
            self._tasks.append(task)
        return task

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait for all tasks, then raise the first failure in the order of addition.

        Args:
            timeout: seconds for all tasks together; None for no limit.

        Raises:
            TaskFailed, CancelledError: a task failed or was cancelled. It is the error of the first
                such task; all other tasks have ended too.
            TimeoutError: some tasks still run or wait.
        """
        deadline = _deadline(timeout)
        first: BaseException | None = None
        for task in self._snapshot():
            try:
                error = task.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(
                    f"[runtime.TaskGroup.wait_all] the group's tasks must end within the timeout; got {task!r}, "
                    f"which still runs or waits after {timeout} s; wait longer, or cancel the group"
                ) from None
            first = first or error
        if first is not None:
            raise first

    def wait_any(self, timeout: float | None = None) -> TaskHandle:
        """The next task that has ended, successfully or not. Each task is returned once.

        Without a timeout the caller helps to run tasks. Tasks that other threads add meanwhile are
        considered only after one of the earlier tasks has ended.

        Raises:
            TimeoutError: no further task has ended within `timeout` seconds.
            ConfigError: all tasks have been returned.
        """
        task = self._next(_deadline(timeout), timeout)
        if task is None:
            _validate.invalid(
                "TaskGroup.wait_any", "a task must be left to wait for", f"none of {len(self)}", "add one"
            )
        return task

    def as_completed(self, timeout: float | None = None) -> Iterator[TaskHandle]:
        """The tasks in the order in which they end, each once. `timeout` is in seconds for all
        tasks together.

        Raises:
            TimeoutError: some tasks have not ended after `timeout` seconds.
        """
        deadline = _deadline(timeout)
        while (task := self._next(deadline, timeout)) is not None:
            yield task

    def cancel(self) -> None:
        """Cancel every task that has not started."""
        for task in self._snapshot():
            task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[TaskHandle]:
        """The tasks in the order of addition, whether they have ended or not. `as_completed`
        returns them in the order in which they end.
        """
        return iter(self._snapshot())

    async def __aiter__(self) -> AsyncIterator[TaskHandle]:
        """The tasks in the order in which they end, each once, without blocking a thread."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[TaskHandle] = asyncio.Queue()
        with self._lock:
            tasks = list(self._pending.values())
            self._pending.clear()
        for task in tasks:
            task.notify(lambda task=task: _put(loop, ended, task))
        for _ in tasks:
            yield await ended.get()

    def __enter__(self) -> TaskGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait_all()
            return
        with suppress(TaskFailed, CancelledError, ConfigError):  # the block's own error is raised
            self.cancel()
            self.wait_all()

    async def __aenter__(self) -> TaskGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                await self._ended()
            except asyncio.CancelledError:
                self.cancel()
                await self._ended()  # running tasks cannot be cancelled; a second cancellation ends this wait
                raise
            return self.wait_all()  # all tasks have ended, so this only raises the first failure
        with suppress(ConfigError):  # the block's own error is raised
            self.cancel()
            await self._ended()

    async def _ended(self) -> None:
        """Waits until all tasks have ended, successfully or not, without blocking the thread."""
        loop = asyncio.get_running_loop()
        for task in self._snapshot():
            if not task.is_complete():
                ended: asyncio.Future[None] = loop.create_future()
                task.notify(lambda ended=ended: wake_loop(loop, ended))
                await ended

    def _check_runtime(self, task: TaskHandle) -> None:
        if self._tasks and self._tasks[0].native is not task.native:  # ids of two runtimes may be equal
            _validate.invalid(
                "TaskGroup.add",
                "a group's tasks must belong to one runtime",
                f"{task!r} of another",
                "make a group for each",
            )

    def _snapshot(self) -> list[TaskHandle]:
        with self._lock:
            return list(self._tasks)

    def _next(self, deadline: float | None, timeout: float | None) -> TaskHandle | None:
        """The next task that has ended; None if all have been returned."""
        while True:
            with self._lock:
                tasks = list(self._pending.values())
            if not tasks:
                return None
            task = self._take(tasks, deadline)
            if task is not None:
                return task
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"[runtime.TaskGroup] a task must end within the timeout; got none after {timeout} s; wait "
                    "longer, or cancel the group"
                )

    def _take(self, tasks: list[TaskHandle], deadline: float | None) -> TaskHandle | None:
        """One of these tasks that has ended, after removing it from the pending tasks. None if none
        ends for a while.
        """
        alone = None if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
        native: Any = tasks[0].native
        place = native.wait_any([task.id for task in tasks], alone)
        if place is None:
            return None
        with self._lock:  # another thread may have taken it
            return self._pending.pop(tasks[place].id, None)


def _deadline(timeout: float | None) -> float | None:
    seconds = _validate.seconds("TaskGroup", "a timeout", timeout)
    return None if seconds is None else time.monotonic() + seconds


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[TaskHandle], task: TaskHandle) -> None:
    with suppress(RuntimeError):  # the loop has been closed: no coroutine waits any more
        loop.call_soon_threadsafe(queue.put_nowait, task)
