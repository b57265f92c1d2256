"""Checks that a task's view of an operand is the part that the task's loop index selects.

A wrong view would read or write other rows than the op's author means, perhaps only if devices
share the rows. Views that depend on several symbols (sizes that a run supplies) cannot be checked
and are accepted.
"""

from __future__ import annotations

from tilewise.ir.lowering import Ref
from tilewise.ir.program import Number, NumberLike, Operand, Source, plain, times

__all__ = ["ALL_ROWS", "has_rows", "is_divided"]

ALL_ROWS = 1 << 40
"""Divides the rows of any loop, so that all of them go together."""


def has_rows(ref: Ref, operand: Operand) -> bool:
    """Whether rows that do not depend on the loop lie inside of a tensor. True if the size, the first
    row or the number of rows is not known when planning.
    """
    first, count = operand.part, operand.parts
    if isinstance(count, Number):
        return isinstance(first, Number) or (type(first) is int and first >= 0)
    if isinstance(first, Number):
        return type(count) is int and count >= 1
    if type(first) is not int or type(count) is not int or first < 0 or count < 1:
        return False
    return ref.extent.source != Source.NOTHING or first + count <= ref.extent.constant


def is_divided(extent: Number, div: NumberLike, size: Number) -> bool:
    """Whether the rows of a loop, divided by `div`, add up to `size`, as far as that is known when
    planning.
    """
    div = plain(div)
    fixed, has_fixed_size = extent.source == Source.NOTHING, size.source == Source.NOTHING
    if isinstance(div, int):
        if div < 1:
            return False
        if fixed and has_fixed_size:
            return -(-extent.constant // div) == size.constant
        return times(size, div) == extent or (div >= ALL_ROWS and has_fixed_size and size.constant == 1)
    if not fixed and div[2:] == extent[2:]:  # they grow alike, so the size does not grow with them
        return size[2:] != extent[2:] and (not has_fixed_size or times(div, size.constant) == extent)
    return True
