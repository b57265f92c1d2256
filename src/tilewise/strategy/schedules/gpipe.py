"""GPipe: the forward passes of all microbatches, then all backward passes (arXiv:1811.06965).

    stage 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3
    stage 1   .  F0 F1 F2 F3 B0 B1 B2 B3

With p stages and m microbatches, a stage is idle for (p - 1)/(m + p - 1) of a step. It stores what
its layers save for all m microbatches.
"""

from __future__ import annotations

from tilewise.strategy.schedules.actions import Action

__all__ = ["gpipe"]


def gpipe(stages: int, chunks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of each stage. `chunks` is 1."""
    order = range(microbatches)
    return tuple(
        (*(Action("F", stage, k) for k in order), *(Action("B", stage, k) for k in order))
        for stage in range(stages)
    )
