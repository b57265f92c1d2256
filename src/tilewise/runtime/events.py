"""Events: counters that tasks can wait for without holding a worker.

Made by `Runtime.event`; raised by anybody: another thread, a callback of a device, a kernel.
"""

from __future__ import annotations

from tilewise._native.tasks import Core

__all__ = ["Event"]


class Event:
    """A counter that rises from 0. `submit(..., wait_for=[(event, 3)])` waits until it has reached 3."""

    __slots__ = ("_core", "id")

    def __init__(self, core: Core) -> None:
        self._core = core
        self.id = core.event_open()

    def raise_(self, by: int = 1) -> None:
        """Count up; tasks that waited for the value it reaches become ready."""
        if not 0 <= by < 1 << 63:
            raise ValueError(
                f"[runtime.Event.raise_] an event must only rise, by less than 2**63; got {by}; pass a positive number"
            )
        self._core.event_raise(self.id, by)

    @property
    def value(self) -> int:
        """How far it has been raised."""
        return int(self._core.event_value(self.id))
