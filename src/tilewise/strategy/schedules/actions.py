"""`Action`: an entry of a pipeline schedule. `turns_of` says which segments of a graph it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tilewise.ir.schedule import Phase, Schedule, SegmentPlace, Turn

__all__ = ["Action", "turns_of"]

_PHASES: dict[str, Phase] = {"F": "forward", "B": "backward"}


class Action(NamedTuple):
    """One pass of one virtual stage for one microbatch.

    Attributes:
        kind: `F` for the forward pass, `B` for the backward pass.
        stage: the virtual stage.
        microbatch: the microbatch.
    """

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def turns_of(
    actions: Sequence[Sequence[Action]], segments: Sequence[SegmentPlace], microbatches: int
) -> tuple[Schedule, ...]:
    """The segments that each stage runs.

    A pass consists of the segments of its virtual stage in graph order: moves from other stages, its
    layers, moves to other stages. After its last action, a stage runs the segments of the update.

    Args:
        actions: the order of each stage.
        segments: all segments in graph order.
        microbatches: number of microbatches.
    """
    num_stages, last = len(actions), microbatches - 1
    schedules = []
    for stage, own in enumerate(actions):
        turns: list[Turn] = []
        for action in own:
            phase = _PHASES[action.kind]
            turns += [
                Turn(phase, number, action.microbatch)
                for number, place in enumerate(segments)
                if place.phase == phase
                and action.stage in (place.stage, place.source)
                and _runs_in(place, action.microbatch, last)
            ]
        turns += [
            Turn("update", number, last)
            for number, place in enumerate(segments)
            if place.phase == "update" and place.is_on(stage, num_stages)
        ]
        schedules.append(tuple(turns))
    return tuple(schedules)


def _runs_in(place: SegmentPlace, microbatch: int, last: int) -> bool:
    return place.microbatches == "each" or microbatch == (0 if place.microbatches == "first" else last)
