"""The learning rate of a step. It is a pure function of the step number, so a resumed run needs no
saved state for it.
"""

from __future__ import annotations

import math

__all__ = ["learning_rate"]


def learning_rate(
    step: int, num_steps: int, top: float, warmup_steps: int, min_ratio: float, schedule: str = "cosine"
) -> float:
    """The learning rate of a step: a linear warm-up to `top`, then the schedule.

    Args:
        step: 0 for the first.
        num_steps: number of steps of the whole run.
        top: the highest rate.
        warmup_steps: steps of the warm-up.
        min_ratio: the last step's rate is `min_ratio * top`; a constant schedule does not use it.
        schedule: `constant`, `linear` or `cosine`. The last two decay from the end of the warm-up
            to the last step.
    """
    if step < warmup_steps:
        return top * (step + 1) / warmup_steps
    if schedule == "constant":
        return top
    span = max(1, num_steps - 1 - warmup_steps)
    done = min(1.0, (step - warmup_steps) / span)
    decay = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return top * (min_ratio + (1.0 - min_ratio) * decay)
