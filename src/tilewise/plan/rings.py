"""Rings: places that the uses of a template take in turn, and the credits that show when a place is
free again.

Peers may still read what a device wrote in one use of a template during the next use. So the uses
take `RING_DEPTH` places in turn, and the writer of a place waits for the credits of the use that
had it before. The number of credits, and the use that they belong to, is a property of the call.
The first uses of a step wait for none. The last use drains the ring, so every step begins with free
places and with all signals waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.program import Number

__all__ = ["RING_DEPTH", "credit_of_drain", "credit_of_write", "credits_of_uses", "place_of_use"]

RING_DEPTH = 2  # one place is read while the next is written


def place_of_use(use: int, age: int) -> int:
    """The place in its ring of use number `use`, or of the use `age` before it."""
    return (use - age) % RING_DEPTH


def credit_of_write() -> tuple[Number, Number]:
    """Numbers of the call: how many credits the writer waits for, and of which use."""
    return Number.of_call(0), Number.of_call(1)


def credit_of_drain(age: int) -> tuple[Number, Number]:
    """The same at the end of a step, for the use that is `age` uses old."""
    return Number.of_call(2 + 2 * age), Number.of_call(3 + 2 * age)


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
