"""Finds what every use of a template writes completely.

After such a write, later writers of the same memory need not wait for its earlier uses
(`plan.bind.reuse`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.tree import Interval
from tilewise.ir.program import Access, LoweredTemplate, Mode, Number, Operand, Source

__all__ = ["written_slots"]


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
