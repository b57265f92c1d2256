"""`TaskGroup`: waits for all or any of its tasks, also in an asyncio loop.

A group is a list of handles with a lock, so several threads may add tasks and wait. Its tasks are
submitted tasks, of one runtime or several, and calls in the background, such as a model's
`step_async`. Iterating over it returns the tasks in the order of addition, any number of times.
`wait_any`, `as_completed` and `async for` return each task once, after it has ended. A group has no
native resources, so dropping it never blocks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from tilewise.core.errors import ConfigError
from tilewise.core.validation import Validator
from tilewise.runtime.handles import Handle, TaskHandle, wake_loop

__all__ = ["TaskGroup"]

_validate = Validator("runtime")
AnyHandle = TypeVar("AnyHandle", bound=Handle)

SLICE_S = 0.05  # how long a wait with a deadline may miss tasks that another thread adds to the group


class TaskGroup:
    """Tasks that are waited for together. `len` is the number of tasks that were added. Iterating
    returns them in the order of addition.

    `with group:` waits for all at the end of the block, and cancels tasks that have not started if
    the block raises. `async with group:` does the same without blocking the thread, also if the
    asyncio task is cancelled there.

    Args:
        tasks: the first tasks, of any kind that `add` accepts.
    """

    def __init__(self, tasks: Iterable[Handle] = ()) -> None:
        self._lock = threading.Lock()
        self._tasks: list[Handle] = []
        # not returned yet by `wait_any` or `as_completed`; by `id`, because runtimes may use equal numbers
        self._pending: dict[int, Handle] = {}
        self._some_ended = threading.Event()  # for groups whose tasks do not all belong to one runtime
        self._notifying: set[int] = set()
        for task in tasks:
            self.add(task)

    def add(self, task: AnyHandle) -> AnyHandle:
        """Add a task, or a call in the background, and return it.

        Raises:
            ConfigError: it is not a handle.
        """
        if not isinstance(task, TaskHandle):
            _validate.instance(
                "TaskGroup.add",
                "a member of a group",
                task,
                Handle,  # type: ignore[type-abstract]
                "add what submit or step_async returned",
            )
        with self._lock:
            self._pending[id(task)] = task
            self._tasks.append(task)
        return task

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait for all tasks, then raise the first failure in the order of addition.

        Args:
            timeout: seconds for all tasks together; None for no limit.

        Raises:
            TaskFailed, CancelledError: a task failed or was cancelled. It is the error of the first
                such task; all other tasks have ended too. A call in the background raises its own
                exception.
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

    def wait_any(self, timeout: float | None = None) -> Handle:
        """The next task that has ended, successfully or not. Each task is returned once.

        Without a timeout the caller helps to run tasks, if all tasks belong to one runtime; in other
        groups, every runtime needs a worker. Tasks that other threads add meanwhile are considered
        only after one of the earlier tasks has ended.

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

    def as_completed(self, timeout: float | None = None) -> Iterator[Handle]:
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

    def __iter__(self) -> Iterator[Handle]:
        """The tasks in the order of addition, whether they have ended or not. `as_completed`
        returns them in the order in which they end.
        """
        return iter(self._snapshot())

    async def __aiter__(self) -> AsyncIterator[Handle]:
        """The tasks in the order in which they end, each once, without blocking a thread."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Handle] = asyncio.Queue()
        with self._lock:
            tasks = list(self._pending.values())
            self._pending.clear()
        for task in tasks:
            task.notify(partial(_put, loop, ended, task))
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
        with suppress(Exception):  # the block's own error is raised
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
                task.notify(partial(wake_loop, loop, ended))
                await ended

    def _snapshot(self) -> list[Handle]:
        with self._lock:
            return list(self._tasks)

    def _next(self, deadline: float | None, timeout: float | None) -> Handle | None:
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

    def _take(self, tasks: list[Handle], deadline: float | None) -> Handle | None:
        """One of these tasks that has ended, after removing it from the pending tasks. None if none
        ends for a while.
        """
        alone = None if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
        ids = _ids_in_one_runtime(tasks)
        if ids is not None:
            native: Any = tasks[0].native  # type: ignore[attr-defined]
            place = native.wait_any(ids, alone)
            ended = None if place is None else tasks[place]
        else:
            ended = self._wait_by_callbacks(tasks, alone)
        if ended is None:
            return None
        with self._lock:  # another thread may have taken it
            return self._pending.pop(id(ended), None)

    def _wait_by_callbacks(self, tasks: list[Handle], seconds: float | None) -> Handle | None:
        """One of these tasks that has ended; None if none has, after waiting for a change."""
        self._some_ended.clear()  # before the tasks are tested, so that no end is missed
        for task in tasks:
            if task.is_complete():
                return task
            with self._lock:
                is_new = id(task) not in self._notifying
                self._notifying.add(id(task))
            if is_new:
                task.notify(self._some_ended.set)
        self._some_ended.wait(seconds)
        return None


def _ids_in_one_runtime(tasks: list[Handle]) -> list[int] | None:
    """The ids of tasks that all belong to one runtime; None for others."""
    ids, owner = [], getattr(tasks[0], "native", None)
    for task in tasks:
        if not isinstance(task, TaskHandle) or task.native is not owner:
            return None
        ids.append(task.id)
    return ids


def _deadline(timeout: float | None) -> float | None:
    seconds = _validate.seconds("TaskGroup", "a timeout", timeout)
    return None if seconds is None else time.monotonic() + seconds


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Handle], task: Handle) -> None:
    with suppress(RuntimeError):  # the loop has been closed: no coroutine waits any more
        loop.call_soon_threadsafe(queue.put_nowait, task)
