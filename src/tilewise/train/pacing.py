"""Estimates how many steps fit into a given time. The estimate is fixed after a tenth of that time.

The learning rate depends on the length of the run, and the speed of a machine must be measured. The
estimate uses the median time of the steps so far, so that a burst of other work has little effect.
The module reads no clock.
"""

from __future__ import annotations

import statistics

__all__ = ["TimeBudget"]

_SHARE = 0.1
_FIRST_STEPS = 2  # they touch memory for the first time


class TimeBudget:
    """Steps for a time.

    Args:
        seconds: for all steps.
        at_least: steps that are done also when they take longer: a slow machine gives more time, not less.
    """

    def __init__(self, seconds: float, at_least: int = 0) -> None:
        self._seconds = seconds
        self._at_least = at_least
        self._ends: list[float] = []

    def step_done(self, seconds: float) -> int | None:
        """Take note of a step's end.

        Args:
            seconds: since the run began.

        Returns:
            The steps of the whole run, as it looks now; None when that is fixed, or nothing can be said yet.
        """
        is_open = not self._ends or self._ends[-1] < _SHARE * self._seconds
        self._ends.append(seconds)
        times = [b - a for a, b in zip(self._ends, self._ends[1:])][_FIRST_STEPS - 1 :]
        if not is_open or not times:
            return None
        left = max(0.0, self._seconds - seconds)
        fitting = len(self._ends) + round(left / max(statistics.median(times), 1e-9))
        return max(fitting, self._at_least)
