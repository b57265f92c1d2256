"""Offsets of everything in one arena, the same on every device.

Buffers with overlapping lifetimes get disjoint ranges, greedily by size. Execution is out of order, so reuse of memory
is also an order between tasks: buffers that share bytes are listed as aliases, and the walker adds the edges.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tilewise.plan.shapes import round_up

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "memory_of_machine",
    "place_buffers",
    "place_in_sequence",
    "shared_bytes",
]

ALIGNMENT = 64
_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_of_machine() -> int:
    """Bytes of physical memory, or what the control group of this process (a container) may have if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _GROUP_LIMITS:
        with suppress(OSError, ValueError):  # not there, or the word "max"
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


@dataclass
class Buffer:
    """A range of the arena.

    Attributes:
        key: what it holds.
        bytes: its size, before alignment.
        category: parameters, gradients, carries, optimizer, activations, temporaries, communication or inputs.
        first, last: positions of the first and last use; buffers that live through a run have none.
        offset: filled in by `place_buffers`.
    """

    key: tuple[object, ...]
    bytes: int
    category: str
    first: int = -1
    last: int = -1
    offset: int = -1

    @property
    def end(self) -> int:
        """One past its last byte, alignment included."""
        return self.offset + round_up(self.bytes, ALIGNMENT)


def place_in_sequence(buffers: Sequence[Buffer], base: int) -> int:
    """Offsets one after another, for buffers that live through a run; returns the end of the region."""
    for buffer in buffers:
        buffer.offset = base
        base = buffer.end
    return base


def place_buffers(buffers: Sequence[Buffer], base: int) -> int:
    """Give every buffer an offset from `base` on; returns the end of the region. Buffers share bytes where their
    lifetimes `[first, last]` do not meet."""
    end = base
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: -b.bytes):
        offset = base
        busy = [p for p in placed if p.first <= buffer.last and buffer.first <= p.last]
        for other in sorted(busy, key=lambda p: p.offset):
            if offset + round_up(buffer.bytes, ALIGNMENT) <= other.offset:
                break
            offset = max(offset, other.end)
        buffer.offset = offset
        placed.append(buffer)
        end = max(end, buffer.end)
    return end


def shared_bytes(buffers: Sequence[Buffer]) -> dict[int, list[int]]:
    """For every buffer (by position in `buffers`) the others that share bytes with it."""
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
