"""The thread that owns the model: takes commands, steps, hands out what comes.

Commands come through a queue that may be written to from anywhere, also while objects are collected within a call. No
error ends the thread: an error outside of a request's step is reported to all requests as a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tilewise.core import ConfigError, InternalError, PlanError, ResourceError, TilewiseError, get_logger
from tilewise.core.threads import BackgroundThread
from tilewise.serve.core import EngineCore, Event
from tilewise.serve.outputs import Delta
from tilewise.serve.request import Request

__all__ = ["Abort", "Add", "Call", "Close", "Command", "Loop", "Sink", "start_thread"]

Sink = Callable[[Delta | BaseException], None]
"""Receives a request's events on the engine's thread; must not block."""


@dataclass(frozen=True)
class Add:
    """New requests, and the function that receives their events."""

    requests: Sequence[Request]
    sink: Sink


@dataclass(frozen=True)
class Abort:
    """Requests end here."""

    request_ids: Sequence[str]


@dataclass(frozen=True)
class Call:
    """Something is done with the core between two steps."""

    function: Callable[[EngineCore], None]


@dataclass(frozen=True)
class Close:
    """The thread ends."""


Command = Add | Abort | Call | Close


def start_thread(loop: Loop, commands: SimpleQueue[Command]) -> BackgroundThread:
    """Start the thread that runs a loop. A program that ends without closing its engine ends the loop after the step
    under way.

    Args:
        loop: to run.
        commands: that it takes.

    Raises:
        ResourceError: the system has no more threads.
    """
    thread = BackgroundThread(loop.run, name="tilewise-engine", stop=lambda: commands.put(Close()))
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceError(
            f"[serve.engine] an engine needs a thread of its own; got none: {error}; raise the limit of processes "
            "(ulimit -u)"
        ) from None
    return thread


class Loop:
    """What the thread runs.

    Args:
        core: of the engine; this thread's alone.
        commands: to do.
    """

    def __init__(self, core: EngineCore, commands: SimpleQueue[Command]) -> None:
        self._core = core
        self._commands = commands
        self._sinks: dict[str, Sink] = {}

    def run(self) -> None:
        """Run until a command stops the thread; requests that are left then end with an error."""
        while True:
            try:
                if not self._obey():
                    break
                if self._core.has_work:
                    self._core.step(self._tell)
            except Exception as error:  # a defect of the engine must not hang its callers
                self._tell(self._core.fail_all(_as_defect(error)))
        self._tell(
            self._core.fail_all(
                PlanError("[serve.engine] the engine must be open; got a closed one; make another")
            )
        )

    def _obey(self) -> bool:
        """Take all commands that are there; waits for one where there is nothing to do. False: end."""
        while True:
            try:
                command = self._commands.get(block=not self._core.has_work)
            except Empty:
                return True
            if isinstance(command, Close):
                return False
            self._tell(self._core.settle())
            if isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Abort):
                for request_id in command.request_ids:
                    self._tell(self._core.abort(request_id))
            else:
                command.function(self._core)

    def _add(self, command: Add) -> None:
        for request in command.requests:
            name = request.request_id
            if self._core.has_request(name):
                again = f"[serve.engine] a request_id names one request at a time; got {name!r} again; choose another"
                _say(command.sink, name, ConfigError(again))
                continue
            try:
                self._core.add(request)
            except Exception as error:  # those behind it are added all the same
                _say(command.sink, name, _as_defect(error))
            else:
                self._sinks[name] = command.sink

    def _tell(self, events: Sequence[Event]) -> None:
        for request, event in events:
            _say(self._sinks[request.request_id], request.request_id, event)
        for request_id in {request.request_id for request, _ in events}:
            if not self._core.has_request(request_id):
                del self._sinks[request_id]


def _say(sink: Sink, request_id: str, event: Delta | BaseException) -> None:
    try:
        sink(event)
    except Exception as error:  # raised by a caller's function; the other callers are notified all the same
        get_logger("serve").warning("notifying the caller of request %r failed: %r", request_id, error)


def _as_defect(error: Exception) -> TilewiseError:
    if isinstance(error, TilewiseError):
        return error
    defect = InternalError(
        f"[serve.engine] a request must not fail otherwise than by its kernels; got {error!r}; report it"
    )
    defect.__cause__ = error
    return defect
