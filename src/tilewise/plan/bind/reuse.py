"""Finds the earlier uses of memory that a write must wait for when templates reuse the same bytes.

The temporaries of all templates share one region, so a write must come after every earlier use of
its bytes. If a template in between always overwrites those bytes, waiting for that template is
enough. `find_conflicts` goes through the uses of a step in order and remembers the latest users of
each range of bytes. A template conflicts only with those, so the number of conflicts grows linearly
with the number of templates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["LiveInterval", "find_conflicts"]


class LiveInterval(NamedTuple):
    """Memory of a template that stays live from one of its ops to another.

    Attributes:
        entries: the tensor entries in it.
        handle: the first of the handles that order its uses; live intervals with the same handle
            order themselves.
        begin, end: its bytes.
        written: end of the bytes, from `begin` on, that every use of the template writes, for any
            sizes of a run.
    """

    entries: tuple[int, ...]
    handle: int
    begin: int
    end: int
    written: int


def find_conflicts(uses: Iterable[Sequence[LiveInterval]]) -> dict[tuple[int, ...], set[int]]:
    """For the entries of each live interval, entries of the others that may still use its bytes
    when it is written.

    Args:
        uses: the live intervals of each use of a template: uses in the order of a step, intervals
            in the order in which they become live.
    """
    conflicts: dict[tuple[int, ...], set[int]] = {}
    last = _LastUsers()
    before: list[Sequence[LiveInterval]] = []
    for live_intervals in uses:
        if not live_intervals:
            continue
        if len(before) == 2 and before[0] is before[1] is live_intervals:
            continue  # a third use in a row has the conflicts of the second
        before = [*before[-1:], live_intervals]
        for interval in live_intervals:
            conflicting = last.follow(interval)
            if conflicting:
                conflicts.setdefault(interval.entries, set()).update(conflicting)
    return conflicts


class _LastUsers:
    """The latest users of each byte range, one entry per handle. A range ends where the next begins."""

    def __init__(self) -> None:
        self.begins: list[int] = [0]
        self.users: list[dict[int, int]] = [{}]

    def follow(self, interval: LiveInterval) -> set[int]:
        """The other users of the interval's bytes. The interval then becomes a user too, and the
        only one of the bytes that it writes.
        """
        first, end = self._cut(interval.begin), self._cut(interval.end)
        own = {interval.handle: interval.entries[0]}
        conflicting = {
            e for users in self.users[first:end] for handle, e in users.items() if handle != interval.handle
        }
        if interval.written > interval.begin:
            after = self._cut(interval.written)
            self.begins[first:after], self.users[first:after] = [interval.begin], [own]
            first += 1
        end = self._cut(interval.end)
        self.users[first:end] = [{**users, **own} for users in self.users[first:end]]
        return conflicting

    def _cut(self, byte: int) -> int:
        """The number of the range that begins at a byte; splits a range if none begins there."""
        at = bisect_left(self.begins, byte)
        if at == len(self.begins) or self.begins[at] != byte:
            self.begins.insert(at, byte)
            self.users.insert(at, self.users[at - 1])
        return at
