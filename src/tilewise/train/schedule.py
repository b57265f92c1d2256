"""The learning rate of a step: a pure function, so that resuming needs the step number only."""

from __future__ import annotations

import math

__all__ = ["learning_rate"]


def learning_rate(step: int, num_steps: int, top: float, warmup_steps: int, min_ratio: float) -> float:
    """Linear warm-up to `top`, then half a cosine down to `min_ratio * top` at the last step.

    Args:
        step: 0 for the first.
        num_steps: of the whole run.
    """
    if step < warmup_steps:
        return top * (step + 1) / warmup_steps
    span = max(1, num_steps - 1 - warmup_steps)
    done = min(1.0, (step - warmup_steps) / span)
    return top * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done)))
