"""The arguments of a submission besides kernel and parameters (tasks, events, hints, a predicate),
and the runtime that they belong to.

Objects of another runtime are rejected. Two runtimes may use the same ids, so native code cannot
always distinguish them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise._native.tasks import OpenRuntime
from tilewise.runtime import checks
from tilewise.runtime.buffers import Buffer, Region
from tilewise.runtime.events import Event
from tilewise.runtime.handles import TaskHandle
from tilewise.runtime.params import TaskExecutionHints
from tilewise.runtime.views import Views

__all__ = ["Extras", "extras_of", "own_buffer", "own_task"]

Extras = tuple[list[int], list[tuple[int, int]], int, int, int, str, float, Views]


def own_buffer(
    native: OpenRuntime, buffer: object, call: str, kinds: tuple[type[Buffer | Region], ...] = (Buffer,)
) -> None:
    """Reject an object that is not a buffer of this runtime."""
    if not isinstance(buffer, kinds):
        names = " or a ".join(kind.__name__ for kind in kinds)
        checks.invalid(call, f"memory must be given as a {names}", checks.shown(buffer), "register it first")
    _check_owner(native, buffer, buffer.native, call)


def own_task(native: OpenRuntime, task: object, call: str) -> None:
    """Reject an object that is not a task of this runtime."""
    handle = checks.instance(call, "a task", task, TaskHandle, "pass what submit returned")
    _check_owner(native, handle, handle.native, call)


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
    """The arguments of the native side.

    Ids of tasks, of events with values, priority, 1 + worker or 0, predicate or 0, name or "",
    deadline or 0, views.
    """
    tasks = checks.sequence("submit", "after", () if after is None else after, "tasks", in_any_order=True)
    for task in tasks:
        own_task(native, task, "submit")
    pairs = checks.sequence(
        "submit", "wait_for", () if wait_for is None else wait_for, "pairs", in_any_order=True
    )
    waits = [_wait_of(native, pair) for pair in pairs]
    priority, worker = 0, 0
    if hints is not None:
        checks.instance("submit", "hints", hints, TaskExecutionHints, "pass TaskExecutionHints(...)")
        hints.check_handles(native)
        priority, worker = hints.priority, 0 if hints.target_worker is None else hints.target_worker + 1
    if predicate is not None:
        own_buffer(native, predicate, "submit")
    handle = 0 if predicate is None else predicate.handle
    title = "" if name is None else checks.text("submit", "a task's name", name)
    limit = 0.0 if deadline is None else checks.patience("submit", "deadline", deadline)
    return [task.id for task in tasks], waits, priority, worker, handle, title, limit, views


def _wait_of(native: OpenRuntime, pair: object) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], Event):
        checks.invalid(
            "submit",
            "wait_for must hold pairs of an event and a value",
            checks.shown(pair),
            "pass (event, value)",
        )
    event, value = pair
    _check_owner(native, event, event._native, "submit")
    return event.id, checks.integer("submit", "a value to wait for", value, 0, (1 << 64) - 1)


def _check_owner(native: OpenRuntime, thing: object, owner: object, call: str) -> None:
    if owner is not native:
        checks.invalid(
            call,
            "tasks, buffers and events must belong to the runtime they are used with",
            f"{checks.shown(thing)} of another",
            "use the runtime that made it",
        )
