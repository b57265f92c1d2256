"""`Event`: a counter that tasks can wait for without occupying a worker.

`Runtime.event` creates an event. To post an event is to increase its counter. Any thread may do so:
a thread of the program, a device's callback, or a kernel.
"""

from __future__ import annotations

from tilewise._native.tasks import OpenRuntime
from tilewise.core.validation import Validator

__all__ = ["Event"]

_validate = Validator("runtime")


class Event:
    """A counter that rises from 0. `submit(..., wait_for=[(event, 3)])` waits until it has reached 3."""

    __slots__ = ("_native", "id")

    def __init__(self, native: OpenRuntime) -> None:
        self._native = native
        self.id = native.event_open()

    def post(self, by: int = 1) -> None:
        """Increase the counter. Tasks that wait for a value that it now reaches become ready."""
        by = _validate.integer("Event.post", "an event must only rise: the step", by, 0, (1 << 63) - 1)
        self._native.event_post(self.id, by)

    @property
    def value(self) -> int:
        """The sum of all posts."""
        return int(self._native.event_value(self.id))
