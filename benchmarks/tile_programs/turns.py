"""Calls that take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["Times", "take_turns"]

Times = Mapping[str, list[float]]


def take_turns(calls: Mapping[str, Callable[[], object]], ends_at: float, at_least: int = 5) -> Times:
    """Seconds of each call in each turn; every other turn is in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # traces, and touches memory
        call()
    order = list(calls)
    while len(seconds[order[0]]) < at_least or time.monotonic() < ends_at:
        for name in order:
            began = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - began)
        order.reverse()
    return seconds
