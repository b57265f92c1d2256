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

from tilewise.core.tree import Interval
from tilewise.ir.program import Access, LoweredTemplate, Mode, Number, Operand, Source

__all__ = ["LiveInterval", "find_conflicts", "written_slots"]


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


def written_slots(template: LoweredTemplate, extents: Sequence[Number]) -> frozenset[int]:
    """The slots whose every row is written by an instruction, in every use and for any sizes of a
    run.

    Args:
        template: the template whose instructions are examined.
        extents: rows of what each slot refers to.
    """
    rows: dict[int, list[Interval]] = {}
    for instruction in template.instructions:
        for operand in instruction.operands:
            if operand.access & Access.OUT:
                written = _rows_written(operand, instruction.extent, extents[operand.slot])
                rows.setdefault(operand.slot, []).append(written)
    return frozenset(slot for slot, intervals in rows.items() if _reach(intervals) >= extents[slot].constant)


def _rows_written(operand: Operand, extent: Number, rows: Number) -> Interval:
    """Rows of a tensor that an instruction writes in every use; none if sizes depend on the run."""
    is_known = extent.source == rows.source == Source.NOTHING and extent.constant > 0
    if operand.null or operand.group >= 0 or not is_known:
        return 0, 0
    if operand.mode in (Mode.WHOLE, Mode.COL, Mode.PANELCOLS):
        return 0, rows.constant
    if operand.mode == Mode.ROWPART:  # handles are those of the whole loop's rows
        first = operand.offset
        return (first, first + extent.constant) if isinstance(first, int) else (0, 0)
    if operand.mode == Mode.ROWS:
        is_fixed = isinstance(operand.part, int) and isinstance(operand.parts, int)
        return (operand.part, operand.part + operand.parts) if is_fixed else (0, 0)  # type: ignore[operator, return-value]
    return (0, -(-extent.constant // operand.div)) if isinstance(operand.div, int) else (0, 0)


def _reach(intervals: list[Interval]) -> int:
    """How far intervals reach from 0 without a gap."""
    reach = 0
    for begin, end in sorted(intervals):
        if begin > reach:
            break
        reach = max(reach, end)
    return reach
