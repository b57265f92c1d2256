"""The thread that owns the model: executes commands, runs steps and delivers events.

Commands arrive in a queue that any thread may write to, even from a finalizer. No error ends the thread: an error
outside of a request's step ends all requests with an InternalError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tilewise.core import ConfigError, InternalError, PlanError, ResourceError, TilewiseError, get_logger
from tilewise.processes.threads import BackgroundThread
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
    """Ends requests."""

    request_ids: Sequence[str]


@dataclass(frozen=True)
class Call:
    """Calls a function with the core between two steps."""

    function: Callable[[EngineCore], None]


@dataclass(frozen=True)
class Close:
    """Ends the thread."""


Command = Add | Abort | Call | Close


def start_thread(loop: Loop, commands: SimpleQueue[Command]) -> BackgroundThread:
    """Start the thread that runs a loop. If the program exits without closing its engine, the loop ends after the
    current step.

    Args:
        loop: the loop to run.
        commands: its command queue.

    Raises:
        ResourceError: the system cannot start another thread.
    """
    thread = BackgroundThread(loop.run, name="tilewise-engine", stop=lambda: commands.put(Close()))
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceError(
            f"[serve.engine] an engine needs a thread; got {error}; raise the limit of processes (ulimit -u)"
        ) from None
    return thread


class Loop:
    """The function of the engine's thread.

    Args:
        core: the engine core, which only this thread uses.
        commands: queue of commands.
    """

    def __init__(self, core: EngineCore, commands: SimpleQueue[Command]) -> None:
        self._core = core
        self._commands = commands
        self._sinks: dict[str, Sink] = {}

    def run(self) -> None:
        """Run until a command stops the thread; remaining requests end with an error."""
        while True:
            try:
                if not self._execute_commands():
                    break
                if self._core.has_work:
                    self._core.step(self._deliver)
            except Exception as error:  # an error in the engine must not hang its callers
                self._deliver(self._core.fail_all(_as_defect(error)))
        self._deliver(
            self._core.fail_all(
                PlanError("[serve.engine] the engine must be open; got a closed one; create another")
            )
        )

    def _execute_commands(self) -> bool:
        """Execute all queued commands. If there is no work, wait for a command. Returns False after
        `Close`.
        """
        while True:
            try:
                command = self._commands.get(block=not self._core.has_work)
            except Empty:
                return True
            if isinstance(command, Close):
                return False
            self._deliver(self._core.settle())
            if isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Abort):
                for request_id in command.request_ids:
                    self._deliver(self._core.abort(request_id))
            else:
                command.function(self._core)

    def _add(self, command: Add) -> None:
        for request in command.requests:
            name = request.request_id
            if self._core.has_request(name):
                rule = "[serve.engine] a request_id must be unique among live requests"
                _call_sink(command.sink, name, ConfigError(f"{rule}; got {name!r} twice; choose another"))
                continue
            try:
                self._core.add(request)
            except Exception as error:  # the other requests are still added
                _call_sink(command.sink, name, _as_defect(error))
            else:
                self._sinks[name] = command.sink

    def _deliver(self, events: Sequence[Event]) -> None:
        for request, event in events:
            _call_sink(self._sinks[request.request_id], request.request_id, event)
        for request_id in {request.request_id for request, _ in events}:
            if not self._core.has_request(request_id):
                del self._sinks[request_id]


def _call_sink(sink: Sink, request_id: str, event: Delta | BaseException) -> None:
    try:
        sink(event)
    except Exception as error:  # raised by a caller's function; the other callers are still notified
        get_logger("serve").warning("notifying the caller of request %r failed: %r", request_id, error)


def _as_defect(error: Exception) -> TilewiseError:
    if isinstance(error, TilewiseError):
        return error
    defect = InternalError(f"[serve.engine] a request may fail only in its kernels; got {error!r}; report it")
    defect.__cause__ = error
    return defect
