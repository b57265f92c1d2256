"""The arguments of a submission besides kernel and parameters (tasks, events, hints, a predicate),
and the check that they belong to the same runtime.

Objects of another runtime are rejected. Two runtimes may use the same ids, so native code cannot
always distinguish them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise._native.tasks import OpenRuntime, Operand
from tilewise.core.validation import Validator, shown
from tilewise.ir.policy import TaskExecutionHints
from tilewise.runtime.buffers import Buffer
from tilewise.runtime.events import Event
from tilewise.runtime.handles import TaskHandle
from tilewise.runtime.params import check_handles
from tilewise.runtime.views import Views

__all__ = ["Extras", "check_owner", "extras_of", "own_buffer"]

_validate = Validator("runtime")

Extras = tuple[list[int], list[tuple[int, int]], int, int, int, str, float, Views]


def own_buffer(native: OpenRuntime, buffer: Operand, call: str) -> None:
    """Raise ConfigError unless `buffer` is a whole buffer of this runtime. A region is rejected,
    because native code would only see the handle, which is that of the whole buffer.
    """
    whole = _validate.instance(call, "memory", buffer, Buffer, "register it, and drop an index")
    check_owner(native, whole, whole.native, call)


def extras_of(
    native: OpenRuntime,
    after: Sequence[TaskHandle] | None,
    wait_for: Sequence[tuple[Event, int]] | None,
    hints: TaskExecutionHints | None,
    predicate: Buffer | None,
    name: str | None,
    deadline: float | None,
    views: Views,
) -> Extras:
    """The arguments of the native function: ids of tasks, ids of events with their values,
    priority, 1 + worker or 0, predicate or 0, name or "", deadline or 0, and views.
    """
    tasks = [] if after is None else list(after)
    for task in tasks:
        check_owner(native, task, task.native, "submit")
    waits = [] if wait_for is None else [_wait_of(native, *pair) for pair in wait_for]
    priority, worker = 0, 0
    if hints is not None:
        check_handles(hints, native)
        priority, worker = hints.priority, 0 if hints.target_worker is None else hints.target_worker + 1
    if predicate is not None:
        own_buffer(native, predicate, "submit")
    handle = 0 if predicate is None else predicate.handle
    title = "" if name is None else _validate.text("submit", "a task's name", name)
    limit = None if deadline is None else _validate.seconds("submit", "deadline", deadline, is_positive=True)
    return [task.id for task in tasks], waits, priority, worker, handle, title, limit or 0.0, views


def _wait_of(native: OpenRuntime, event: Event, value: int) -> tuple[int, int]:
    check_owner(native, event, event._native, "submit")
    return event.id, _validate.integer("submit", "a value to wait for", value, 0, (1 << 64) - 1)


def check_owner(native: OpenRuntime, thing: object, owner: object, call: str) -> None:
    """Raise ConfigError unless `owner`, the runtime of `thing`, is this one."""
    if owner is not native:
        _validate.invalid(
            call,
            "tasks, buffers and events must belong to the runtime they are used with",
            f"{shown(thing)} of another",
            "use the runtime that made it",
        )
