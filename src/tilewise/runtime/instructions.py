"""The shapes that `Program.add_tensor` and `Program.add_instr` take: extents and operands.

Plain tuples with names; the numbers are part of the tile program's native format (native/runtime/program.h).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Access", "Extent", "Mode", "Operand"]


class Mode(enum.IntEnum):
    """Which part of a tensor an operand of iteration [b, e) views."""

    WHOLE = 0  # all rows
    ROW = 1  # rows [b / div, ceil(e / div)), clipped to the tensor
    COL = 2  # all rows, columns [b, e)
    ROWPART = 3  # the part-th of `parts` equal shares of rows [b, e)


class Access(enum.IntEnum):
    """How a task uses the tiles that an operand touches. Peers' tiles and constants take NONE."""

    NONE = 0
    IN = 1
    OUT = 2
    INOUT = 3


class Extent(NamedTuple):
    """`constant + multiple * symbols[symbol]` rows; symbol -1: `constant` alone."""

    constant: int
    symbol: int = -1
    multiple: int = 0


class Operand(NamedTuple):
    """One tile operand of an instruction. `null` passes an absent operand to the kernel."""

    slot: int
    mode: int = Mode.WHOLE
    access: int = Access.NONE
    peer: int = -1
    div: int = 1
    part: int = 0
    parts: int = 1
    null: bool = False
