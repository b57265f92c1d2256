"""Zero bubble, schedule ZB-H1: the backward pass in two parts (arXiv:2401.10241).

    I(v, k)   gradients of a layer's input, which the stage before waits for
    W(v, k)   gradients of its weights, for which nothing waits

    stage 0   F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 .  I3 W3
    stage 1   .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3

A stage fills the time in which it would wait with W. Stage s delays W by s microbatches. If all parts
take equally long, a stage is idle for (p - 1)/(3m + p - 1) of a step: a third of 1F1B's time. What F
saves for I is stored for min(p - s, m) microbatches, as with 1F1B; what F and I save for W, for up to
min(p, m).
"""

from __future__ import annotations

from tilewise.strategy.schedules.actions import Action
from tilewise.strategy.schedules.one_f_one_b import one_f_one_b

__all__ = ["zero_bubble"]


def zero_bubble(stages: int, chunks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of each stage: that of 1F1B with divided backward passes. `chunks` is 1."""
    orders = []
    for stage, own in enumerate(one_f_one_b(stages, chunks, microbatches)):
        order: list[Action] = []
        for action in own:
            is_forward, ready = action.kind == "F", action.microbatch - stage
            order.append(action if is_forward else Action("I", stage, action.microbatch))
            if not is_forward and ready >= 0:
                order.append(Action("W", stage, ready))
        order += [Action("W", stage, k) for k in range(max(microbatches - stage, 0), microbatches)]
        orders.append(tuple(order))
    return tuple(orders)
