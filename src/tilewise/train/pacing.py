"""Estimates how many steps fit into a given time. The estimate is fixed after a tenth of that time.

The number of steps must be fixed early, because the learning rate depends on it. The speed of a
machine must be measured first. The estimate uses the median time of the steps so far, so that a
burst of other work has little effect. This module reads no clock.
"""

from __future__ import annotations

import statistics

__all__ = ["TimeBudget"]

_SHARE = 0.1
_FIRST_STEPS = 2  # they touch memory for the first time


class TimeBudget:
    """The number of steps that fit into a given time.

    Args:
        seconds: time for all steps.
        at_least: minimum number of steps, even if a slow machine needs more time for them.
    """

    def __init__(self, seconds: float, at_least: int = 0) -> None:
        self._seconds = seconds
        self._at_least = at_least
        self._ends: list[float] = []

    def step_done(self, seconds: float) -> int | None:
        """Record the end of a step.

        Args:
            seconds: time since the run began.

        Returns:
            The estimated number of steps of the whole run. None if the number is fixed already, or
            if too few steps are done to estimate it.
        """
        is_open = not self._ends or self._ends[-1] < _SHARE * self._seconds
        self._ends.append(seconds)
        times = [b - a for a, b in zip(self._ends, self._ends[1:])][_FIRST_STEPS - 1 :]
        if not is_open or not times:
            return None
        remaining = max(0.0, self._seconds - seconds)
        fitting = len(self._ends) + round(remaining / max(statistics.median(times), 1e-9))
        return max(fitting, self._at_least)
