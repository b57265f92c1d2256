"""Schedules: the order in which a stage executes segments and microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.schedule import Schedule, Turn

__all__ = ["one_stage"]


def one_stage(phases: Sequence[str], microbatches: int) -> Schedule:
    """One microbatch after the other, each forward and backward; what belongs to the update stands in the last one.

    Args:
        phases: per segment, in the graph's order: `forward`, `backward` or `update`.
        microbatches: parts of the batch.
    """
    last = microbatches - 1
    return tuple(
        Turn(phase, segment, microbatch)  # type: ignore[arg-type]
        for microbatch in range(microbatches)
        for segment, phase in enumerate(phases)
        if phase != "update" or microbatch == last
    )
