"""Chooses the offsets of all buffers in an arena, the memory of a device. The offsets are equal on
every device.

The live interval of a buffer is from its first to its last use. Buffers whose live intervals
overlap get disjoint ranges. Tasks run out of order, so tasks on a buffer must wait for the tasks on
an earlier buffer that used the same bytes. `shared_bytes` lists buffers that share bytes, and
native code adds the edges between their tasks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from tilewise.plan.shapes import round_up

__all__ = [
    "ALIGNMENT",
    "FILE_PAGE",
    "OFFLOADED",
    "Buffer",
    "Placed",
    "align_for_files",
    "apart",
    "file_begin_of",
    "gap_for",
    "memory_of",
    "most_at_one_time",
    "place_buffers",
    "place_in_sequence",
    "place_lingering",
    "shared_bytes",
]

ALIGNMENT = 64
OFFLOADED = "offloaded"  # category of buffers in the device's file
FILE_PAGE = 4096  # the unit of disk transfers (native/memory/spill_file.h)
_FEW = 512  # up to this many buffers, all pairs are compared
_WASTE = 64  # a region at most 1/64 above the lower bound is good enough


class Buffer(NamedTuple):
    """A range of the arena, or what is to get one.

    Attributes:
        key: names the content.
        bytes: size before alignment.
        category: parameters, gradients, carries, rings, optimizer, gathered, activations,
            temporaries or inputs; offloaded: in the device's file.
        first, last: positions of the first and last use; -1 for buffers of the whole run.
        offset: its first byte; -1 before it is placed.
    """

    key: tuple[object, ...]
    bytes: int
    category: str
    first: int = -1
    last: int = -1
    offset: int = -1

    @property
    def end(self) -> int:
        """One past the buffer's last byte, with alignment."""
        return self.offset + round_up(self.bytes, ALIGNMENT)


def apart(buffers: Sequence[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
    """Buffers in memory, and buffers in the device's file."""
    return [b for b in buffers if b.category != OFFLOADED], [b for b in buffers if b.category == OFFLOADED]


def align_for_files(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Sizes rounded up to whole pages of a file, so that every buffer begins at a page if the first
    does.
    """
    return [b._replace(bytes=round_up(b.bytes, FILE_PAGE)) for b in buffers]


Placed = tuple[list[Buffer], int]
"""Buffers with their offsets, and the end of their region."""


def place_in_sequence(buffers: Sequence[Buffer], base: int) -> Placed:
    """Place buffers of the whole run one after another."""
    placed = []
    for buffer in buffers:
        placed.append(buffer._replace(offset=base))
        base += round_up(buffer.bytes, ALIGNMENT)
    return placed, base


def place_buffers(buffers: Sequence[Buffer], base: int) -> Placed:
    """Give every buffer an offset from `base` on.

    Buffers may share bytes if their live intervals `[first, last]` do not overlap. They are placed
    in the order in which they become live, each in the lowest gap that is large enough. This takes
    n log n steps. If intervals are nested, like those of saved activations, the region is hardly
    larger than the largest sum of live sizes. If there are few buffers, placing them by size is
    tried too, and the smaller region is used.
    """
    offsets, end = _place_by_time(buffers)
    least = most_at_one_time(buffers)
    if len(buffers) <= _FEW and end > least + least // _WASTE:
        other, other_end = _place_by_size(buffers)
        if other_end < end:
            offsets, end = other, other_end
    return [b._replace(offset=base + offset) for b, offset in zip(buffers, offsets)], base + end


def place_lingering(
    buffers: Sequence[Buffer], lingering: Set[tuple[object, ...]], room: int
) -> Sequence[Buffer]:
    """Place buffers that are placed from 0 on again, so that some keep their bytes beyond their
    last use.

    Other devices may read a buffer after its last use here. If its bytes were overwritten
    immediately, this device would wait for the slowest reader, and small delays would spread to all
    devices. So the bytes of such a buffer stay unused for as many positions as there is room for.
    Positions are cyclic here: after the last position the next use of the same memory begins.

    Args:
        buffers: all buffers, with offsets.
        lingering: keys of those that other devices read.
        room: the largest end of a buffer.
    """
    if lingering.isdisjoint(b.key for b in buffers):
        return buffers
    end = max(b.last for b in buffers)

    def longer(buffer: Buffer, positions: int) -> Buffer:
        if buffer.key not in lingering:
            return buffer
        last = buffer.last + positions
        return buffer._replace(last=last) if last <= end else buffer._replace(first=0, last=end)

    result, fewest, most = buffers, 0, end + 1
    while fewest < most:
        positions = (fewest + most + 1) // 2
        placed, needed = place_buffers([longer(b, positions) for b in buffers], 0)
        if needed > room:
            most = positions - 1
            continue
        fewest = positions
        result = [b._replace(offset=of.offset) for b, of in zip(buffers, placed)]
    return result


def gap_for(buffer: Buffer, placed: Sequence[Buffer], base: int) -> int:
    """The lowest offset from `base` on at which a buffer overlaps no buffer that is live at the
    same time.
    """
    size = round_up(buffer.bytes, ALIGNMENT)
    offset = base
    busy = (b for b in placed if b.first <= buffer.last and buffer.first <= b.last and b.bytes)
    for other in sorted(busy, key=lambda b: b.offset):
        if offset + size <= other.offset:
            break
        offset = max(offset, other.end)
    return offset


def most_at_one_time(buffers: Sequence[Buffer]) -> int:
    """The largest sum of sizes of buffers that are live at one position. No placement can need
    less.
    """
    changes: dict[int, int] = {}
    for buffer in buffers:
        size = round_up(buffer.bytes, ALIGNMENT)
        changes[buffer.first] = changes.get(buffer.first, 0) + size
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - size
    now = most = 0
    for position in sorted(changes):
        now += changes[position]
        most = max(most, now)
    return most


def _place_by_time(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """First fit in the order in which buffers become live. Among buffers that become live at the
    same time, the longest-lived is placed first.
    """
    sizes = [round_up(b.bytes, ALIGNMENT) for b in buffers]
    offsets = [0] * len(buffers)
    gaps = _Gaps()
    by_death = sorted(range(len(buffers)), key=lambda i: buffers[i].last)
    dead = 0
    for i in sorted(range(len(buffers)), key=lambda i: (buffers[i].first, -buffers[i].last, -sizes[i], i)):
        while dead < len(by_death) and buffers[by_death[dead]].last < buffers[i].first:
            gaps.give_back(offsets[by_death[dead]], sizes[by_death[dead]])
            dead += 1
        offsets[i] = gaps.take(sizes[i])
    return offsets, gaps.highest


class _Gaps:
    """The free ranges below the end of a region, disjoint and in order. The region grows if no free
    range is large enough.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.end = 0
        self.highest = 0

    def take(self, size: int) -> int:
        for i, (begin, end) in enumerate(self.ranges):
            if end - begin >= size:
                self.ranges[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin = self.end
        if self.ranges and self.ranges[-1][1] == self.end:
            begin = self.ranges.pop()[0]
        self.end = begin + size
        self.highest = max(self.highest, self.end)
        return begin

    def give_back(self, offset: int, size: int) -> None:
        if size == 0:
            return
        insort(self.ranges, (offset, offset + size))
        at = self.ranges.index((offset, offset + size))
        first = at - 1 if at > 0 and self.ranges[at - 1][1] == offset else at
        last = at + 1 if at + 1 < len(self.ranges) and self.ranges[at + 1][0] == offset + size else at
        self.ranges[first : last + 1] = [(self.ranges[first][0], self.ranges[last][1])]


def _place_by_size(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Place the largest buffers first, each at the lowest offset that `gap_for` finds."""
    offsets, placed = [0] * len(buffers), list[Buffer]()
    for i in sorted(range(len(buffers)), key=lambda i: -round_up(buffers[i].bytes, ALIGNMENT)):
        offsets[i] = gap_for(buffers[i], placed, 0)
        placed.append(buffers[i]._replace(offset=offsets[i]))
    return offsets, max((b.end for b in placed), default=0)


def shared_bytes(buffers: Sequence[Buffer]) -> dict[int, list[int]]:
    """For every buffer, by position in `buffers`, the positions of the other buffers that share
    bytes with it.
    """
    order = sorted(range(len(buffers)), key=lambda i: buffers[i].offset)
    shared: dict[int, list[int]] = {}
    live: list[int] = []
    for i in order:
        live = [j for j in live if buffers[j].end > buffers[i].offset]
        for j in live:
            shared.setdefault(i, []).append(j)
            shared.setdefault(j, []).append(i)
        live.append(i)
    return shared


def file_begin_of(regions: Mapping[str, int]) -> int:
    """The address at which a device's file begins: the first page after its memory."""
    return round_up(memory_of(regions), FILE_PAGE)


def memory_of(regions: Mapping[str, int]) -> int:
    """Bytes of the regions in memory."""
    return max(sum(size for name, size in regions.items() if name != "files"), 64)
