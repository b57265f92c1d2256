"""The programs of one group in the order of their calls, and handles of those that run in the
background.

A blocking call runs on the calling thread if no program waits. A background thread runs the programs
of other calls, one after another.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from tilewise.processes.threads import BackgroundThread

__all__ = ["ProgramHandle", "ProgramQueue"]


class ProgramHandle:
    """A program that was started and not waited for. Several threads may use it; `await handle`
    waits without blocking a thread. Dropping a handle does not stop the program.

    Args:
        value: what `result` returns.
    """

    def __init__(self, value: Any = None) -> None:
        self._future: Future[Any] = Future()
        self._value = value

    @classmethod
    def complete(cls, value: Any = None) -> ProgramHandle:
        """The handle of a program that had nothing to do."""
        handle = cls(value)
        handle._run(lambda: None)
        return handle

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the program.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            TaskFailed, PeerLost, CommTimeout: as for a blocking call.
            TimeoutError: the program still runs or waits.
        """
        self._future.result(timeout)

    def is_complete(self) -> bool:
        """Whether the program has ended, with or without an error."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait, then return the tensor that a collective wrote; None for a tile program.

        Raises:
            TaskFailed, PeerLost, CommTimeout, TimeoutError: see `wait`.
        """
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return why the program failed; None if it succeeded.

        Raises:
            TimeoutError: the program still runs or waits.
        """
        return self._future.exception(timeout)

    def notify(self, function: Callable[[], object]) -> None:
        """Call a function at the end of the program, on the thread that ran it; at once if it has
        ended. The function must not wait for another program of the group.
        """
        self._future.add_done_callback(lambda _: function())

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._value)

    def __repr__(self) -> str:
        return f"ProgramHandle({'complete' if self.is_complete() else 'running'})"


class ProgramQueue:
    """Runs calls one after another, in the order in which they were made."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held while a call runs
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], ProgramHandle]] = deque()  # the first one may run
        self._thread: BackgroundThread | None = None
        self._is_ending = False

    def run(self, call: Callable[[], None]) -> None:
        """Run a call after all earlier ones, and wait for its end."""
        if self._waiting or not self._turn.acquire(blocking=False):
            self.start(call, ProgramHandle()).wait()
            return
        try:
            call()
        finally:
            self._turn.release()

    def start(self, call: Callable[[], None], handle: ProgramHandle) -> ProgramHandle:
        """Run a call in the background, after all earlier ones."""
        with self._changed:
            if self._thread is None:
                self._thread = BackgroundThread(self._serve, name="tilewise programs", stop=self._end)
                self._thread.start()
            self._waiting.append((call, handle))
            self._changed.notify()
        return handle

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                call, handle = self._waiting[0]
            with self._turn:
                handle._run(call)
            self._waiting.popleft()

    def _end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def close(self) -> None:
        """Wait until all calls have run, and end the thread."""
        if self._thread is not None:
            self._thread.stop()
