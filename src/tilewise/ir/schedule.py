"""The order of a step as data: per stage of a pipeline, a list of segments, each with its microbatch.
A segment is the call of a layer, or a run of ops between two calls. Without a pipeline there is one
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tilewise.ir.layout import EVERY_STAGE

__all__ = ["MakeSchedules", "Phase", "Schedule", "SegmentPlace", "Turn"]

Phase = Literal["forward", "backward", "update"]


class Turn(NamedTuple):
    """One entry of a schedule.

    Attributes:
        kind: the phase: `forward`, `backward` or `update`; or `acknowledged`, if the sender of a move
            waits until the receivers have read what it sent in its last microbatch.
        segment: number of the segment.
        microbatch: number of the microbatch. The update belongs to the last one. A turn `acknowledged`
            has the number that would follow the last.
    """

    kind: Phase | Literal["acknowledged"]
    segment: int
    microbatch: int


Schedule = tuple[Turn, ...]


class SegmentPlace(NamedTuple):
    """The properties of a segment that a schedule needs.

    Attributes:
        phase: its phase.
        stage: the virtual stage that runs it, or `EVERY_STAGE`.
        source: of a move, the virtual stage that sends; otherwise `stage`.
        microbatches: the microbatches in which it runs: `each`; `first`, if its result is the same
            in all of them; or `last`, if it needs sums over all of them and comes after all passes.
        is_weight_part: of the backward pass, whether it only leads to gradients of weights.
    """

    phase: Phase
    stage: int = 0
    source: int = 0
    microbatches: Literal["each", "first", "last"] = "each"
    is_weight_part: bool = False

    def is_sent_by(self, stage: int, num_stages: int) -> bool:
        """Whether it is a move that the devices of a stage send."""
        return self.source != self.stage and self.source % num_stages == stage

    def is_on(self, stage: int, num_stages: int) -> bool:
        """Whether the devices of a stage take part."""
        return EVERY_STAGE in (self.stage, self.source) or stage in (
            self.stage % num_stages,
            self.source % num_stages,
        )


MakeSchedules = Callable[[Sequence[SegmentPlace], int], tuple[Schedule, ...]]
"""The order of a step on each stage, from all segments in graph order and the number of microbatches."""
