"""Schedules: the order in which segments and microbatches run. A segment is the call of a layer, or
a run of ops between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.schedule import Schedule, Turn

__all__ = ["one_stage"]


def one_stage(phases: Sequence[str], microbatches: int) -> Schedule:
    """The schedule of one stage: for each microbatch, the forward segments and then the backward
    segments. The update runs after those of the last microbatch.

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
