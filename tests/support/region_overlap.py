"""Which strided boxes of one buffer share bytes: exactly, for all regions of a recorded graph at once.

Owns the geometry behind `graph_check`. A region becomes coordinates in its own strides, so boxes with equal strides
are compared dimension by dimension; other pairs by the runs of bytes that they consist of. No region means all of the
buffer. A region without bytes overlaps nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.core.errors import ConfigError
from tilewise.observe.dependency_graph import GraphRegion

__all__ = ["RegionTable"]

Numbers = NDArray[np.int64]
END_OF_BUFFER = 1 << 62
_MOST_RUNS = 1 << 22  # their starts take 32 MiB


class _Boxes(NamedTuple):
    """Boxes with equal strides: which regions they are, and their corners `[box, dim]`, upper ones excluded."""

    ids: Numbers
    low: Numbers
    high: Numbers


class RegionTable:
    """All distinct regions of one buffer, numbered by their first byte; the whole buffer comes last."""

    def __init__(self, regions: Sequence[GraphRegion | None]) -> None:
        distinct = dict.fromkeys(regions)
        self.regions = sorted(distinct, key=lambda r: END_OF_BUFFER if r is None else r.offset)
        self.numbers = {region: number for number, region in enumerate(self.regions)}
        bounds = [_bounds(region) for region in self.regions]
        self._bounds = np.array(bounds, np.int64).reshape(-1, 2)
        self._num_boxes = len(self.regions) - (None in distinct)
        self._longest = max((high - low for low, high in bounds[: self._num_boxes]), default=0)
        self._system = [_system(region) for region in self.regions]
        self._is_contiguous = [
            region is None or (bool(system) and high - low == prod(region.size))
            for region, system, (low, high) in zip(self.regions, self._system, bounds)
        ]
        members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, system in enumerate(self._system):
            members[system].append(number)
        self._boxes = {
            system: self._corners(system, numbers) for system, numbers in members.items() if system
        }

    def overlapping(self, number: int, among: Container[int]) -> list[int]:
        """Those of some regions that share a byte with this one."""
        low, high = self._bounds[number].tolist()
        if low == high:
            return []
        first, last = self._near(low - self._longest, high)
        bounds = self._bounds[first:last]
        is_near = (bounds[:, 1] > low) & (bounds[:, 0] < bounds[:, 1])
        system = self._system[number]
        if system:
            boxes = self._boxes[system]
            rows = slice(*np.searchsorted(boxes.ids, [first, last]))
            me = np.searchsorted(boxes.ids, number)
            apart = ((boxes.low[rows] >= boxes.high[me]) | (boxes.high[rows] <= boxes.low[me])).any(axis=1)
            is_near[boxes.ids[rows][apart] - first] = False
        near = [other for other in (np.flatnonzero(is_near) + first).tolist() if other in among]
        alike = [other for other in near if system and self._system[other] == system]
        unlike = [other for other in near if not system or self._system[other] != system]
        whole = [other for other in range(self._num_boxes, len(self.regions)) if other in among]
        return alike + self._with_common_run(number, unlike) + whole

    def inside(self, number: int) -> list[int]:
        """Regions all of whose bytes belong to this one; some may be missing when strides differ."""
        low, high = self._bounds[number].tolist()
        first, last = self._near(low, high)
        if self._is_contiguous[number]:
            is_whole = self.regions[number] is None
            numbers = np.flatnonzero(self._bounds[first:last, 1] <= high) + first
            return [*numbers.tolist(), *([number] if is_whole else [])]
        boxes = self._boxes.get(self._system[number])
        if boxes is None:
            return [number]
        rows = slice(*np.searchsorted(boxes.ids, [first, last]))
        me = np.searchsorted(boxes.ids, number)
        within = ((boxes.low[rows] >= boxes.low[me]) & (boxes.high[rows] <= boxes.high[me])).all(axis=1)
        return [int(n) for n in boxes.ids[rows][within]]

    def _near(self, low: int, high: int) -> tuple[int, int]:
        """Indices of the boxes that begin from `low` on and before `high`."""
        first, last = np.searchsorted(self._bounds[: self._num_boxes, 0], [low, high])
        return int(first), int(last)

    def has_overlap(self, a: int, b: int) -> bool:
        """Whether two regions share a byte."""
        if self._system[a] and self._system[a] == self._system[b]:
            boxes = self._boxes[self._system[a]]
            i, j = np.searchsorted(boxes.ids, [a, b])
            together = bool(((boxes.low[i] < boxes.high[j]) & (boxes.high[i] > boxes.low[j])).all())
            return together and self._has_bytes(a) and self._has_bytes(b)
        return self._has_bytes(a) and self._has_bytes(b) and bool(self._with_common_run(a, [b]))

    def _has_bytes(self, number: int) -> bool:
        return bool(self._bounds[number, 0] < self._bounds[number, 1])

    def _with_common_run(self, number: int, others: list[int]) -> list[int]:
        """Those of some regions that share a run of bytes with this one; the whole buffer does with all."""
        region = self.regions[number]
        boxes = [box for box in map(self.regions.__getitem__, others) if box is not None]
        if region is None or len(boxes) < len(others) or not others:
            return others
        (mine, my_length), runs = _runs(region), [_runs(box) for box in boxes]
        counts = [len(starts) for starts, _ in runs]
        starts = np.concatenate([starts for starts, _ in runs])
        ends = starts + np.repeat([length for _, length in runs], counts)
        # the last of my runs that begins before another ends must end after that one begins
        before = np.searchsorted(mine, ends, side="left") - 1
        is_shared = (before >= 0) & (mine[before] + my_length > starts)
        firsts = np.cumsum([0, *counts[:-1]])
        return np.array(others)[np.logical_or.reduceat(is_shared, firsts)].tolist()  # type: ignore[no-any-return]

    def _corners(self, system: tuple[int, ...], numbers: list[int]) -> _Boxes:
        low = np.empty((len(numbers), len(system)), np.int64)
        size = np.empty_like(low)
        for row, number in enumerate(numbers):
            region = self.regions[number]
            assert region is not None  # the whole buffer has no strides
            low[row], size[row] = _coordinates(region), region.size
        return _Boxes(np.array(numbers, np.int64), low, low + size)


def _bounds(region: GraphRegion | None) -> tuple[int, int]:
    """First byte and the byte after the last; equal for an empty region."""
    if region is None:
        return 0, END_OF_BUFFER
    if 0 in region.size:
        return region.offset, region.offset
    reach = sum((size - 1) * stride for size, stride in zip(region.size, region.stride))
    return region.offset, region.offset + reach + 1


def _coordinates(region: GraphRegion) -> list[int]:
    """The first byte's place in the region's own strides."""
    rest, place = region.offset, []
    for stride in region.stride:
        place.append(rest // stride)
        rest %= stride
    return place


def _system(region: GraphRegion | None) -> tuple[int, ...]:
    """Strides in which the region is a box; empty when it wraps around one of them, or is the whole buffer.

    In a system every byte has one place (strides descend to 1), so boxes overlap exactly when they do in every
    dimension. A box wraps when what lies inside one step of a dimension reaches beyond that step.
    """
    if region is None or region.stride[-1] != 1 or 0 in region.size:
        return ()
    place, inner = _coordinates(region), 0
    for dim in range(len(place) - 1, 0, -1):
        inner += (place[dim] + region.size[dim] - 1) * region.stride[dim]
        if inner >= region.stride[dim - 1]:
            return ()
    return region.stride


@lru_cache(maxsize=1 << 14)
def _runs(region: GraphRegion) -> tuple[Numbers, int]:
    """Sorted starts of the runs of bytes, and the length of all runs."""
    is_dense = region.stride[-1] == 1
    outer = len(region.size) - 1 if is_dense else len(region.size)
    if prod(region.size[:outer]) > _MOST_RUNS:
        raise ConfigError(
            f"[support.check_graph] regions of one buffer with different strides are compared run by run, and must "
            f"have at most {_MOST_RUNS} runs of bytes; got {region}; record smaller ones"
        )
    starts = np.array([region.offset], np.int64)
    for size, stride in zip(region.size[:outer], region.stride[:outer]):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return np.unique(starts), region.size[-1] if is_dense else 1
