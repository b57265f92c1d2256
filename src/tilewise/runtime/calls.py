"""Calls that run in the background, one after another: a queue with one thread, and their handles.

A model (`GraphInstance`) and a group of devices (`DeviceGroup`) have a queue each, because a run
uses all of their memory. Calls run in the order in which they were made. A blocking call takes its
turn among them, and runs on the thread that makes it. The queue starts its thread with the first
call that needs it.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tilewise.core import get_logger
from tilewise.core.errors import ConfigError, ResourceError, TaskFailed
from tilewise.core.validation import Validator, shown
from tilewise.processes.threads import BackgroundThread
from tilewise.runtime.handles import await_handle, leave_block

__all__ = ["CallHandle", "CallQueue"]

_validate = Validator("runtime", ConfigError)


class CallHandle:
    """A call in the background, as a `Handle`. `GraphInstance.step_async` and other asynchronous
    calls return it.

    Several threads may use it. `with handle:` waits at the end of the block, and cancels the call
    first if the block raises. `await handle` waits without blocking a thread, and cancels the call
    if the wait is cancelled. Dropping a handle neither blocks nor cancels the call.

    Args:
        name: the call's name in messages.
        call: the function to run; None for a call that had nothing to do.
        result: what `result` returns instead of the function's value.
        deadline: seconds from now by which the call must have started.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], Any] | None,
        *,
        result: Any = None,
        deadline: float | None = None,
    ) -> None:
        self.name = name
        self._call, self._result = call, result
        self._deadline_s = deadline
        self._end = None if deadline is None else time.monotonic() + deadline
        self._future: Future[Any] = Future()
        if call is None:
            self._future.set_result(result)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the call.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            Exception: the one that the call raised.
            TaskFailed: the call had not started at its deadline.
            CancelledError: the call was cancelled before it started.
            TimeoutError: the call still runs or waits.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def is_complete(self) -> bool:
        """Whether the call has ended, with or without an error. Never blocks."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait, then return the result of the call.

        Raises:
            Exception: see `wait`.
        """
        self.wait(timeout)
        return self._future.result(0)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, then return why the call failed; None if it succeeded.

        Raises:
            TimeoutError: the call still runs or waits.
        """
        seconds = _validate.seconds("CallHandle.wait", "a timeout", timeout)
        try:
            error = self._future.exception(seconds)
        except CancelledError:
            return CancelledError(
                f"[runtime.CallHandle] a call must not be cancelled before its result is read; got {self.name}, which "
                "was cancelled before it started; call it again"
            )
        except concurrent.futures.TimeoutError:  # not the built-in class before Python 3.11
            raise TimeoutError(
                f"[runtime.CallHandle] a call must end within the timeout; got {self.name}, which still runs or waits "
                f"after {timeout} s; wait longer, or cancel it"
            ) from None
        if error is not None and not isinstance(error, Exception):  # KeyboardInterrupt
            raise error
        return error

    def notify(self, callback: Callable[[], object]) -> None:
        """Call a function once at the end of the call, on the thread that ended it; at once if the
        call has ended. The function must be short, and must not wait for another call of the same
        object. Its exception is logged.
        """
        if not callable(callback):
            rule = "a callback must be callable without arguments"
            _validate.invalid("CallHandle.notify", rule, shown(callback), "pass a function")
        self._future.add_done_callback(lambda _: callback())

    def cancel(self) -> None:
        """Skip the call if it has not started. A call that runs or has ended is not affected."""
        self._future.cancel()

    def detach(self) -> None:
        """State that no thread will wait for the call. If it fails, the failure is logged as an
        error.
        """
        self._future.add_done_callback(self._log_failure)

    def _log_failure(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, CancelledError):
            get_logger("runtime").error("a detached call of %s failed: %s", self.name, error)

    def _run(self) -> None:
        """Run the call on this thread, unless it was cancelled or its deadline has passed."""
        call, self._call = self._call, None  # the function holds the model and its inputs
        if not self._future.set_running_or_notify_cancel():
            return
        if self._end is not None and time.monotonic() > self._end:
            self._future.set_exception(self._late())
            return
        try:
            assert call is not None
            value = call()
        except BaseException as error:
            if error.__traceback__ is not None:
                error.__traceback__ = (
                    error.__traceback__.tb_next
                )  # without this frame, which holds the handle
            self._future.set_exception(error)
        else:
            self._future.set_result(value if self._result is None else self._result)

    def _late(self) -> TaskFailed:
        return TaskFailed(
            f"[runtime.CallHandle] a call must start by its deadline; got {self.name}, which still waited for earlier "
            f"calls {self._deadline_s} s after it was made; it did not run; allow more time, or queue fewer calls",
            op=self.name,
        )

    def _drop(self, cause: str) -> None:
        """End the call without running it."""
        self._call = None
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(
                CancelledError(
                    f"[runtime.CallHandle] a call must not be cancelled before its result is read; got {self.name}, "
                    f"which was cancelled before it started, {cause}; call it again"
                )
            )

    def __enter__(self) -> CallHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_block(self, error)

    def __await__(self) -> Generator[Any, None, Any]:
        return await_handle(self)

    def __repr__(self) -> str:
        return f"CallHandle({self.name!r}, {'complete' if self.is_complete() else 'not complete'})"


class _Turn:
    """The place of a blocking call in the queue."""


class CallQueue:
    """The calls of one object, in the order in which they were made. Any thread may use it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name, self._process = name, os.getpid()
        self._changed = threading.Condition()
        self._entries: deque[CallHandle | _Turn] = deque()
        self._running: CallHandle | _Turn | None = None
        self._is_ending = False
        self._thread: BackgroundThread | None = None

    def start(self, handle: CallHandle) -> CallHandle:
        """Run a call in the background, after all earlier ones.

        Raises:
            ConfigError: the queue is closed, or belongs to the parent of this process.
            ResourceError: the system cannot start another thread.
        """
        self._require_own()
        with self._changed:
            if self._is_ending:
                _validate.invalid(
                    "CallQueue", "a queue of calls must be open", "a closed one", "make the call before close"
                )
            if self._thread is None:
                self._thread = self._started_thread()
            self._entries.append(handle)
            self._changed.notify_all()
        return handle

    def _started_thread(self) -> BackgroundThread:
        thread = BackgroundThread(self._serve, name=self._name, stop=self.end)
        try:
            thread.start()
        except RuntimeError as error:
            raise ResourceError(
                f"[runtime.CallQueue] a call in the background needs a thread; got {error}; raise the limit of "
                "processes (ulimit -u)"
            ) from None
        return thread

    @contextmanager
    def turn(self) -> Generator[None, None, None]:
        """A block that runs on this thread after all earlier calls, and before all later ones.

        Raises:
            ConfigError: this is the queue's own thread, which would wait for itself, or the queue
                belongs to the parent of this process.
        """
        self._require_own()
        own = _Turn()
        try:  # from the beginning, because Ctrl-C may come between any two lines
            self._take(own)
            yield
        finally:
            with self._changed:
                if self._running is own:
                    self._running = None
                elif own in self._entries:
                    self._entries.remove(own)
                self._changed.notify_all()

    def _require_own(self) -> None:
        if os.getpid() != self._process:  # a fork has no thread, and its copy of the mutex may be locked
            _validate.invalid(
                "CallQueue",
                "calls may be made only in the process that made their object",
                "a call in a forked one",
                "make the object there",
            )

    def _take(self, own: _Turn) -> None:
        with self._changed:
            if not self._entries and self._running is None:
                self._running = own
                return
            if threading.current_thread() is self._thread:
                _validate.invalid(
                    "CallQueue",
                    "a callback must not wait for other calls of the same object",
                    "a blocking call in a callback",
                    "make it on another thread",
                )
            self._entries.append(own)
            self._changed.wait_for(lambda: self._entries[0] is own and self._running is None)
            self._running = self._entries.popleft()

    def cancel(self, cause: str) -> None:
        """Cancel all calls in the background that have not started.

        Args:
            cause: the end of the sentence "the call was cancelled, ...".
        """
        with self._changed:
            dropped = [entry for entry in self._entries if isinstance(entry, CallHandle)]
            self._entries = deque(entry for entry in self._entries if isinstance(entry, _Turn))
            self._changed.notify_all()
        for handle in dropped:  # without the mutex, because callbacks run here
            handle._drop(cause)

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Run the next call when its turn comes. Returns False when the queue ends."""
        with self._changed:
            self._changed.wait_for(self._may_serve)
            if self._is_ending:
                return False
            handle = self._running = self._entries.popleft()
        assert isinstance(handle, CallHandle)
        try:
            handle._run()
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
        return True

    def _may_serve(self) -> bool:
        is_next = bool(self._entries) and isinstance(self._entries[0], CallHandle)
        return self._is_ending or (is_next and self._running is None)

    def end(self) -> None:
        """Cancel all calls that have not started, and let the thread end, without waiting for it. Does
        nothing in a forked child.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self.cancel("when its queue was closed")

    def close(self) -> None:
        """Like `end`, then wait for the thread. To let calls finish, close within `turn`."""
        self.end()
        if self._thread is not None:
            self._thread.wait()
