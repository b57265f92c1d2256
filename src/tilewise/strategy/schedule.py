"""Schedules: the order in which a stage executes segments and microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.schedule import Schedule, Turn

__all__ = ["one_stage"]


def one_stage(phases: Sequence[str], microbatches: int) -> Schedule:
    """The schedule of one stage: for each microbatch, forward and then backward; the update runs in
    the last one.

    Args:
        phases: phase of each segment in graph order: `forward`, `backward` or `update`.
        microbatches: number of microbatches.
    """
    last = microbatches - 1
    return tuple(
        Turn(phase, segment, microbatch)  # type: ignore[arg-type]
        for microbatch in range(microbatches)
        for segment, phase in enumerate(phases)
        if phase != "update" or microbatch == last
    )
