"""Boxes of a tensor: ranges along each dim, and whether several boxes together cover the tensor
exactly.

The functions are pure functions of numbers. Files of training checkpoints and of PyTorch's
distributed checkpoints say which parts of a tensor they contain. `misfit` checks this before any
element is read: parts must lie in their tensor, must not overlap, and must together cover it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from tilewise.core import CheckpointError
from tilewise.core.validation import Validator, shown

__all__ = ["Box", "Misfit", "misfit"]

_validate = Validator("checkpoint", CheckpointError)


@dataclass(frozen=True)
class Box:
    """A box of a tensor: a range along each dim.

    Attributes:
        begin: index of the first element.
        sizes: number of elements along each dim.
    """

    begin: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, value in (("begin", self.begin), ("sizes", self.sizes)):
            if not isinstance(value, tuple) or not all(isinstance(n, (int, np.integer)) for n in value):
                _validate.invalid("box", f"{name} must be a tuple of integers", shown(value), "correct it")

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor."""
        return Box((0,) * len(shape), shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The end index (exclusive) along each dim."""
        return tuple(b + s for b, s in zip(self.begin, self.sizes))

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select the box's elements from the whole tensor."""
        return tuple(slice(b, e) for b, e in zip(self.begin, self.end))

    def meet(self, other: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty."""
        begin = tuple(max(a, b) for a, b in zip(self.begin, other.begin))
        sizes = tuple(min(a, b) - c for a, b, c in zip(self.end, other.end, begin))
        return None if any(size <= 0 for size in sizes) else Box(begin, sizes)

    def inside(self, outer: Box) -> Box:
        """The same box, relative to a larger box that contains it."""
        return Box(tuple(b - o for b, o in zip(self.begin, outer.begin)), self.sizes)


class Misfit(NamedTuple):
    """Why boxes do not make a tensor.

    Attributes:
        boxes: the positions of the wrong boxes; empty if elements are missing.
        words: what is wrong.
    """

    boxes: tuple[int, ...]
    words: str


def misfit(shape: Sequence[int], boxes: Sequence[Box]) -> Misfit | None:
    """Why boxes do not contain every element of a tensor exactly once; None if they do.

    Args:
        shape: shape of the tensor.
        boxes: the boxes. Their numbers of dims are checked too.
    """
    for place, box in enumerate(boxes):
        has_dims = len(box.begin) == len(box.sizes) == len(shape)
        if not has_dims or any(b < 0 or s < 0 or b + s > n for b, s, n in zip(box.begin, box.sizes, shape)):
            return Misfit((place,), f"{list(box.sizes)} at {list(box.begin)} lies outside of {list(shape)}")
    pair = _overlapping(boxes) if shape else (0, 1) if len(boxes) > 1 else None
    if pair is not None:
        return Misfit(pair, "overlap")
    missing = prod(shape) - sum(box.num_elements for box in boxes)
    return Misfit((), f"{missing} of {prod(shape)} elements are missing") if missing or not boxes else None


def _overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of the first two boxes that overlap; None if no boxes overlap."""
    begins = np.array([box.begin for box in boxes], np.int64)
    ends = np.array([box.end for box in boxes], np.int64)
    for i in range(len(boxes) - 1):
        begin, end = np.maximum(begins[i], begins[i + 1 :]), np.minimum(ends[i], ends[i + 1 :])
        meets = (begin < end).all(axis=1)
        if meets.any():
            return i, i + 1 + int(meets.argmax())
    return None
