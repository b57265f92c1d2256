"""Rings and credits. A ring is several places in memory that the uses of a template take in turn. A
credit is the post by which a peer says that it has read a place.

What a device wrote in one use of a template, peers (other devices of its device group) may still
read during the next use. So the uses take `RING_DEPTH` places in turn, and the writer of a place
waits for the credits of the earlier use of this place. The number of credits, and the use that they
belong to, are numbers of the call. The first uses of a step wait for no credits. The last use waits
for all credits that are left (it drains the ring), so every step begins with free places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise.ir.program import Number

__all__ = ["RING_DEPTH", "Sent", "credit_of_call", "credits_of_uses", "numbers_of_moves", "place_of_use"]

RING_DEPTH = 2  # one place is read while the next is written


def place_of_use(use: int, age: int) -> int:
    """The place in a ring that use number `use` takes, or the use `age` uses before it."""
    return (use - age) % RING_DEPTH


def credit_of_call(number: int) -> tuple[Number, Number]:
    """Two numbers of the call: how many credits a task waits for, and the use that they belong to.
    Number 0 is for the writer; at the end of a step, number 1 + age is for the drain of the use
    `age` uses before.
    """
    return Number.of_call(2 * number), Number.of_call(2 * number + 1)


def credits_of_uses(positions: Sequence[int]) -> list[tuple[int, ...]]:
    """The numbers of all calls that share a ring.

    Args:
        positions: positions of the calls in their list, in order.
    """
    result = []
    for use, position in enumerate(positions):
        before = use - RING_DEPTH
        numbers = [1, positions[before]] if before >= 0 else [0, position]
        for age in range(RING_DEPTH):
            is_due = use == len(positions) - 1 and age <= use
            numbers += [1, positions[use - age]] if is_due else [0, position]
        result.append(tuple(numbers))
    return result


class Sent(NamedTuple):
    """Numbers of a call that moves a tensor between stages of a pipeline.

    What a stage sends in one call may be read while the stage computes the next microbatch. So it
    waits in its next call until it has been read; after the last call there is one that only waits.

    Attributes:
        use: the microbatch.
        before: how often the receivers of the call before must acknowledge: 1; 0 in the first call.
        use_before: the microbatch of that call.
    """

    use: Number = Number.of_call(0)
    before: Number = Number.of_call(1)
    use_before: Number = Number.of_call(2)


def numbers_of_moves(microbatches: Sequence[int]) -> list[tuple[int, ...]]:
    """The numbers of all calls of one move, which move a tensor in these microbatches."""
    before = (microbatches[0], *microbatches)
    return [(k, int(i > 0), before[i]) for i, k in enumerate(microbatches)]
