"""Which memory a write must wait for, where templates work in the same bytes one after the other.

The temporaries of all templates lie in one region. A write has to come after every earlier use of its bytes; but where
a template in between writes the same bytes anew, in every use, to wait for that one is to wait for those before it. So
a walk over a step's uses keeps, byte for byte, who had it last, and a template meets those who lie behind it there, not
all that there are: a thousand different templates have a thousand times the pairs of one, not a million times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilewise.core.tree import Interval
from tilewise.ir.program import Access, LoweredTemplate, Mode, Number, Operand, Source

__all__ = ["Tenant", "meetings", "written_slots"]


class Tenant(NamedTuple):
    """Memory of a template, which its uses work on from one op to another.

    Attributes:
        entries: that see it.
        handle: the first of those that order its uses; tenants with equal ones order themselves.
        begin, end: its bytes.
        written: one past the bytes from `begin` on that every use of the template writes, whatever the run's sizes.
    """

    entries: tuple[int, ...]
    handle: int
    begin: int
    end: int
    written: int


def meetings(uses: Iterable[Sequence[Tenant]]) -> dict[tuple[int, ...], set[int]]:
    """Per entries of a tenant an entry of each that may still use some of the bytes when it writes them.

    Args:
        uses: of templates, in the order of a step: their tenants, in the order in which they come to life.
    """
    found: dict[tuple[int, ...], set[int]] = {}
    last = _LastTenants()
    before: list[Sequence[Tenant]] = []
    for tenants in uses:
        if not tenants:
            continue
        if len(before) == 2 and before[0] is before[1] is tenants:
            continue  # a third use in a row finds what the second found
        before = [*before[-1:], tenants]
        for tenant in tenants:
            met = last.follow(tenant)
            if met:
                found.setdefault(tenant.entries, set()).update(met)
    return found


class _LastTenants:
    """Per byte who may still use it, an entry by handle. A range ends where the next begins."""

    def __init__(self) -> None:
        self.begins: list[int] = [0]
        self.users: list[dict[int, int]] = [{}]

    def follow(self, tenant: Tenant) -> set[int]:
        """Who may still use the tenant's bytes, itself left out; from now on it does, alone where it writes."""
        first, end = self._cut(tenant.begin), self._cut(tenant.end)
        own = {tenant.handle: tenant.entries[0]}
        met = {e for users in self.users[first:end] for handle, e in users.items() if handle != tenant.handle}
        if tenant.written > tenant.begin:
            after = self._cut(tenant.written)
            self.begins[first:after], self.users[first:after] = [tenant.begin], [own]
            first += 1
        end = self._cut(tenant.end)
        self.users[first:end] = [{**users, **own} for users in self.users[first:end]]
        return met

    def _cut(self, byte: int) -> int:
        """The range that begins at a byte, which is made where there is none."""
        at = bisect_left(self.begins, byte)
        if at == len(self.begins) or self.begins[at] != byte:
            self.begins.insert(at, byte)
            self.users.insert(at, self.users[at - 1])
        return at


def written_slots(template: LoweredTemplate, extents: Sequence[Number]) -> frozenset[int]:
    """The slots whose every row some instruction writes, in every use and with any sizes of a run.

    Args:
        template: whose instructions are looked at.
        extents: rows of what each slot stands for.
    """
    rows: dict[int, list[Interval]] = {}
    for instruction in template.instructions:
        for operand in instruction.operands:
            if operand.access & Access.OUT:
                written = _rows_written(operand, instruction.extent, extents[operand.slot])
                rows.setdefault(operand.slot, []).append(written)
    return frozenset(slot for slot, found in rows.items() if _reach(found) >= extents[slot].constant)


def _rows_written(operand: Operand, extent: Number, rows: Number) -> Interval:
    """Rows of a tensor that an instruction writes in every use; none where sizes come with the run."""
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
    """How far from 0 on intervals leave no gap."""
    reach = 0
    for begin, end in sorted(intervals):
        if begin > reach:
            break
        reach = max(reach, end)
    return reach
