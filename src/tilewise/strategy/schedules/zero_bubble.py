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

__all__ = ["zero_bubble"]


def zero_bubble(stages: int, chunks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of each stage. `chunks` is 1."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        order = [Action("F", stage, k) for k in range(ahead)]
        for k in range(microbatches):
            if k + ahead < microbatches:
                order.append(Action("F", stage, k + ahead))
            order.append(Action("I", stage, k))
            if k >= stage:
                order.append(Action("W", stage, k - stage))
        order += [Action("W", stage, k) for k in range(max(microbatches - stage, 0), microbatches)]
        orders.append(tuple(order))
    return tuple(orders)
