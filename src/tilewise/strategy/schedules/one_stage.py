"""The order without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.schedule import Schedule, SegmentPlace, Turn

__all__ = ["one_stage"]


def one_stage(segments: Sequence[SegmentPlace], microbatches: int) -> tuple[Schedule, ...]:
    """The schedule of one stage: for each microbatch, the forward segments and then the backward
    segments. The update runs after those of the last microbatch.

    Args:
        segments: all segments in graph order.
        microbatches: number of microbatches.
    """
    last = microbatches - 1
    turns = tuple(
        Turn(place.phase, segment, microbatch)
        for microbatch in range(microbatches)
        for segment, place in enumerate(segments)
        if place.phase != "update" or microbatch == last
    )
    return (turns,)
