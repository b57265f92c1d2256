"""1F1B: a stage runs a backward pass as soon as it can, then the next forward pass
(arXiv:1806.03377, arXiv:2104.04473).

    stage 0   F0 F1 .  .  B0 F2 B1 F3 B2 .  B3
    stage 1   .  F0 B0 F1 B1 F2 B2 F3 B3

Stage s of p first runs p - s - 1 forward passes, so that the last stage can begin. It is idle for
(p - 1)/(m + p - 1) of a step, as with GPipe, but stores what its layers save for only min(p - s, m)
microbatches.
"""

from __future__ import annotations

from tilewise.strategy.schedules.actions import Action

__all__ = ["one_f_one_b"]


def one_f_one_b(stages: int, chunks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of each stage. `chunks` is 1."""
    orders = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, microbatches)
        order = [Action("F", stage, k) for k in range(warm_up)]
        for k in range(microbatches):
            if k + warm_up < microbatches:
                order.append(Action("F", stage, k + warm_up))
            order.append(Action("B", stage, k))
        orders.append(tuple(order))
    return tuple(orders)
