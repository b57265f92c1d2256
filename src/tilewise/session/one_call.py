"""Checks that a call may begin: it is the only one, it runs in the process that made the instance,
the instance is open, and its weights are complete.

Every public method of `GraphInstance` checks this first, so a rejected call has changed nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator

__all__ = ["OneCall"]

_ALLOWED_WHEN_TORN = ("load_parameters", "load_state_dict", "initialize", "memory_usage", "close")
_validate = Validator("session", PlanError)


class OneCall:
    """The state of one model's calls. Called with the name of a public method, it returns a context
    in which that method runs.

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
        self._lock = threading.Lock()
        self._process = os.getpid()

    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that created the model, and so has none of its
        workers.
        """
        return os.getpid() != self._process

    @contextmanager
    def __call__(self, call: str) -> Iterator[None]:
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
        if not self._lock.acquire(blocking=False):
            _validate.invalid(
                call,
                "a model runs one call at a time",
                "a call during another thread's",
                "wait for that call",
            )
        try:
            yield
        finally:
            self._lock.release()
