"""The order of a step as data: a list of the segments that a stage executes, each with its
microbatch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Schedule", "Turn"]


class Turn(NamedTuple):
    """One entry of a schedule.

    Attributes:
        kind: the phase: `forward`, `backward` or `update`.
        segment: number of the layer call or run of ops.
        microbatch: the part of the batch; the update belongs to the last one.
    """

    kind: Literal["forward", "backward", "update"]
    segment: int
    microbatch: int


Schedule = tuple[Turn, ...]
