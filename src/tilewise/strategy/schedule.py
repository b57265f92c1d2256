"""Schedules: in which order a stage walks segments and microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.schedule import Schedule, Turn

__all__ = ["one_stage"]


def one_stage(phases: Sequence[str], microbatches: int) -> Schedule:
    """One microbatch after the other, each forward and backward; then the update.

    Args:
        phases: per segment, in the graph's order: `forward`, `backward` or `update`.
        microbatches: parts of the batch.
    """
    turns = [
        Turn(phase, segment, microbatch)  # type: ignore[arg-type]
        for microbatch in range(microbatches)
        for segment, phase in enumerate(phases)
        if phase != "update"
    ]
    last = microbatches - 1
    turns += [Turn("update", segment, last) for segment, phase in enumerate(phases) if phase == "update"]
    return tuple(turns)
