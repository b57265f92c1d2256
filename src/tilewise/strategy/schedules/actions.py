"""`Action`: an entry of a pipeline schedule. `turns_of` says which segments of a graph it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from tilewise.ir.schedule import Phase, Schedule, SegmentPlace, Turn

__all__ = ["Action", "turns_of"]

_PHASES: dict[str, Phase] = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


class Action(NamedTuple):
    """One pass of one virtual stage for one microbatch.

    Attributes:
        kind: `F` for the forward pass, `B` for the backward pass; or the two parts of the backward
            pass: `I` for the gradients that the stage before waits for, then `W` for those of the
            stage's own weights.
        stage: the virtual stage.
        microbatch: the microbatch.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def turns_of(
    actions: Sequence[Sequence[Action]], segments: Sequence[SegmentPlace], microbatches: int
) -> tuple[Schedule, ...]:
    """The segments that each stage runs.

    A step begins with what is the same in all microbatches. Then come the actions. A pass consists
    of the segments of its virtual stage in graph order: moves from other stages, its layers, moves
    to other stages. After all actions comes what needs the sums of all microbatches. Then a stage
    waits until all that it has sent has been read. The update ends the step.

    Args:
        actions: the order of each stage.
        segments: all segments in graph order.
        microbatches: number of microbatches.
    """
    last = microbatches - 1
    return tuple(tuple(_turns(own, stage, len(actions), segments, last)) for stage, own in enumerate(actions))


def _turns(
    actions: Sequence[Action], stage: int, num_stages: int, segments: Sequence[SegmentPlace], last: int
) -> Iterator[Turn]:
    """The turns of one stage."""
    own = [(number, place) for number, place in enumerate(segments) if place.is_on(stage, num_stages)]
    for number, place in own:
        if place.microbatches == "first":
            yield Turn(place.phase, number, 0)
    for action in actions:
        phase = _PHASES[action.kind]
        for number, place in own:
            is_in_pass = place.phase == phase and action.stage in (place.stage, place.source)
            if action.kind in "IW":
                is_in_pass = is_in_pass and place.is_weight_part == (action.kind == "W")
            if is_in_pass and place.microbatches == "each":
                yield Turn(phase, number, action.microbatch)
    for number, place in own:
        if place.microbatches == "last":
            yield Turn(place.phase, number, last)
    for number, place in own:
        if place.is_sent_by(stage, num_stages) and place.phase != "update":
            yield Turn("acknowledged", number, 1 if place.microbatches == "first" else last + 1)
    for number, place in own:
        if place.phase == "update":
            yield Turn("update", number, last)
            if place.is_sent_by(stage, num_stages):
                yield Turn("acknowledged", number, last + 1)
