"""How long each result of a root op is live, and how many microbatches of it are in memory at once.

A tensor is live in a microbatch from the turn that computes it to the last turn that reads it. If
this interval is within one run of segments in graph order, its memory is free for other tensors
before and after (`live_segments`). If other microbatches run in between, as in a pipeline, each
microbatch that is in flight has a slot of its own. A slot is given to the first microbatch that
finds it free, so a tensor has as many slots as microbatches are in flight at one time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilewise.ir.schedule import Schedule

__all__ = ["Lifetime", "Uses", "find_lifetimes"]


class Lifetime(NamedTuple):
    """Where and in how many slots a tensor is live.

    Attributes:
        first, last: it shares no bytes with tensors that are live in one of these segments.
        slots: the slot of each microbatch; empty if there is one slot for all.
    """

    first: int
    last: int
    slots: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        """Copies in memory."""
        return max(self.slots, default=0) + 1


class Uses(NamedTuple):
    """The segments that use a tensor.

    Attributes:
        first, last: the first and the last of them, in graph order.
        sent: the move that sends it to another stage; -1 if none does. In its next turn, the move
            waits until the receivers have read what it sent.
        only: `last` or `first` if it has a value in this microbatch only.
    """

    first: int
    last: int
    sent: int = -1
    only: str = ""


class _Order:
    """A stage's schedule: where each segment runs in each microbatch."""

    def __init__(self, schedule: Schedule, num_segments: int) -> None:
        self.position = {(turn.segment, turn.microbatch): i for i, turn in enumerate(schedule)}
        self.num_segments = num_segments
        self.run: list[int] = []  # per position: runs of one microbatch in graph order
        for i, turn in enumerate(schedule):
            before = schedule[i - 1]
            goes_on = i and before.microbatch == turn.microbatch and before.segment < turn.segment
            self.run.append(self.run[-1] + (not goes_on) if i else 0)

    def lifetime(self, uses: Uses, microbatches: int) -> Lifetime:
        """The lifetime of a tensor with these uses."""
        spans = []
        for k in range(microbatches):
            span = [
                self.position[turn]
                for turn in ((uses.first, k), (uses.last, k), (uses.sent, k), (uses.sent, k + 1))
                if turn in self.position
            ]
            if span and (not uses.only or k == (0 if uses.only == "first" else microbatches - 1)):
                spans.append((k, min(span), max(span)))
        is_brief = uses.only != "first" and all(self.run[a] == self.run[b] for _, a, b in spans)
        if is_brief:
            return Lifetime(uses.first, uses.last)
        if uses.only:
            return Lifetime(0, self.num_segments - 1)
        slots, ends = [0] * microbatches, list[int]()
        for k, begin, end in spans:
            free = next((slot for slot, last in enumerate(ends) if last < begin), len(ends))
            ends[free : free + 1] = [end]
            slots[k] = free
        return Lifetime(0, self.num_segments - 1, tuple(slots) if len(ends) > 1 else ())


def find_lifetimes(
    uses: Mapping[int, Uses],
    stage_of: Mapping[int, int],
    schedules: Sequence[Schedule],
    num_segments: int,
    microbatches: int,
) -> dict[int, Lifetime]:
    """The lifetime of each tensor.

    Args:
        uses: the segments that use it, on the stage that computes it.
        stage_of: this stage, if there are several.
        schedules: the order of a step on each stage.
    """
    if len(schedules) == 1:
        return {t: Lifetime(of.first, of.last) for t, of in uses.items()}
    orders = [_Order(schedule, num_segments) for schedule in schedules]
    lifetime_of_uses: dict[tuple[int, Uses], Lifetime] = {}
    lifetimes = {}
    for t, of in uses.items():
        key = stage_of[t], of
        if key not in lifetime_of_uses:
            lifetime_of_uses[key] = orders[key[0]].lifetime(of, microbatches)
        lifetimes[t] = lifetime_of_uses[key]
    return lifetimes
