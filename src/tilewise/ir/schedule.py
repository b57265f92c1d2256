"""The order of a step as data: a list of segments, each with its microbatch. A segment is the call
of a layer, or a run of ops between two calls.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Schedule", "Turn"]


class Turn(NamedTuple):
    """One entry of a schedule.

    Attributes:
        kind: the phase: `forward`, `backward` or `update`.
        segment: number of the segment.
        microbatch: number of the microbatch. The update belongs to the last one.
    """

    kind: Literal["forward", "backward", "update"]
    segment: int
    microbatch: int


Schedule = tuple[Turn, ...]
