"""Rings: places that uses of a template take in turn, and the credits that say when one is free again.

What a device writes for its peers in one use of a template they may still read in the next. So uses take `RING_DEPTH`
places in turn, and who writes into a place waits for the credits of the use that had it before. How many credits, and
of which use they are, belongs to the call: the first uses of a step wait for none, and the last one drains the ring, so
that every step begins with free places and signals that all have been waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.program import Number

__all__ = ["RING_DEPTH", "credit_of_drain", "credit_of_write", "credits_of_uses", "place_of_use"]

RING_DEPTH = 2  # one place is read while the next is written


def place_of_use(use: int, age: int) -> int:
    """The place that use number `use`, or the one `age` uses before it, has in its ring."""
    return (use - age) % RING_DEPTH


def credit_of_write() -> tuple[Number, Number]:
    """Numbers of the call: how many credits the writer waits for, and of which use."""
    return Number.of_call(0), Number.of_call(1)


def credit_of_drain(age: int) -> tuple[Number, Number]:
    """The same for the end of a step, of the use that is `age` uses old."""
    return Number.of_call(2 + 2 * age), Number.of_call(3 + 2 * age)


def credits_of_uses(positions: Sequence[int]) -> list[tuple[int, ...]]:
    """The numbers of all calls that share a ring.

    Args:
        positions: of the calls in their list, in order.
    """
    found = []
    for use, position in enumerate(positions):
        before = use - RING_DEPTH
        numbers = [1, positions[before]] if before >= 0 else [0, position]
        for age in range(RING_DEPTH):
            is_due = use == len(positions) - 1 and age <= use
            numbers += [1, positions[use - age]] if is_due else [0, position]
        found.append(tuple(numbers))
    return found
