"""The order of a step as data: a list of the segments that a stage executes, each with its
microbatch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Schedule", "Turn"]


class Turn(NamedTuple):
    """One entry of a schedule.

    Attributes:
        kind: what is done; also the program phase it belongs to.
        segment: number of the layer call or run of ops it is done to.
        microbatch: for which part of the batch; the update belongs to the last.
    """

    kind: Literal["forward", "backward", "update"]
    segment: int
    microbatch: int


Schedule = tuple[Turn, ...]
