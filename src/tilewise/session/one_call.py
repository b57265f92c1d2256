"""Checks that a call may begin: it runs in the process that made the instance, the instance is open,
its weights are complete, and no other thread makes a blocking call.

Every public method of `GraphInstance` checks this first, so a rejected call has changed nothing.
Asynchronous calls and blocking ones run in the order in which they were made.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator
from tilewise.runtime.calls import CallHandle, CallQueue

__all__ = ["OneCall"]

_ALLOWED_WHEN_TORN = ("load_parameters", "load_state_dict", "initialize", "memory_usage", "close")
_validate = Validator("session", PlanError)


class OneCall:
    """The state of one model's calls. Called with the name of a public method, it returns a context
    in which that method runs, after the asynchronous calls that were made before.

    Attributes:
        is_closed: no call is allowed any more.
        is_torn: weights are being written, or were not completely written; only calls that write
            all of them are allowed.

    Raises:
        PlanError: the call is not allowed.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.is_torn = False
        self._lock = threading.Lock()  # held by the one thread that makes a blocking call
        self._calls = CallQueue("tilewise model")
        # the thread must not outlive a model that was dropped without `close`
        weakref.finalize(self, self._calls.end).atexit = False
        self._process = os.getpid()

    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that created the model, and so has none of its
        workers.
        """
        return os.getpid() != self._process

    def require(self, call: str) -> None:
        """Check that a call is allowed, apart from calls of other threads.

        Raises:
            PlanError: it is not.
        """
        if self.is_closed:
            _validate.invalid(call, "the model must be open", "a closed one", "instantiate the graph again")
        if self.is_forked():
            _validate.invalid(
                call,
                "a model may be used only in the process that made it",
                "a call in a forked one",
                "instantiate it there",
            )
        if self.is_torn and call not in _ALLOWED_WHEN_TORN:
            _validate.invalid(
                call,
                "a model must be loaded again after a load that failed",
                "a call after a failed load",
                "call load_parameters, load_state_dict or initialize",
            )

    @contextmanager
    def __call__(self, call: str) -> Iterator[None]:
        self.require(call)
        if not self._lock.acquire(blocking=False):
            _validate.invalid(
                call,
                "a model runs one call at a time",
                "a call during another thread's",
                "wait for that call",
            )
        try:
            with self._calls.turn():
                self.require(call)  # earlier calls may have changed what is allowed
                yield
        finally:
            self._lock.release()

    def start(self, name: str, call: Callable[[], Any], deadline: float | None) -> CallHandle:
        """Run a call in the background, after all earlier calls. If it fails while it runs, the
        asynchronous calls behind it are cancelled, because they were made in the expectation of its
        effects.

        Args:
            name: the public method.
            call: what it does.
            deadline: seconds from now by which it must have started; None for no limit.
        """
        if deadline is not None:
            deadline = _validate.seconds(name, "deadline", deadline, is_positive=True)

        def run() -> Any:
            try:
                self.require(name)
                return call()
            except BaseException as error:
                self._calls.cancel(f"because an earlier call failed: {error}")
                raise

        return self._calls.start(CallHandle(name, run, deadline=deadline))

    def cancel(self) -> None:
        """Cancel asynchronous calls that have not started."""
        self._calls.cancel("because the model is being closed")

    def close(self) -> None:
        """Allow no further call, and end the thread of asynchronous ones. Call it in the context of
        the last call.
        """
        self.is_closed = True
        self._calls.close()
