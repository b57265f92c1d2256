"""All-to-all: every device of a group copies some rows of other members, as many of each as the
record says. A broadcast, a gather, a scatter and a transfer between two devices are special cases,
in which some pairs of members copy no rows.

Each device starts with its own rows and goes on with the member after it, so that at no time all
devices read the memory of one. It is used in programs that consist of it (see
`plan.collectives.arrays`), so no signals are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.mesh import Axes
from tilewise.ir.lowering import Tiles
from tilewise.ir.program import Collective, Mode, Number, NumberLike, Operand, upper
from tilewise.plan.collectives.handshake import ExchangeLowering

__all__ = ["expand_all_to_all"]

_Piece = tuple[int, int, int, int]  # sender, its first row, the receiver's first row, number of rows


def expand_all_to_all(low: ExchangeLowering, record: Collective) -> Collective:
    """One copy per sender, and per `step` rows. A device with fewer copies than others copies no
    rows in the remaining ones.
    """
    assert low.is_whole_program
    src, dst = low.views[record.source], low.views[record.target]
    group = low.numbers.group(record.axes)
    pieces = [_pieces_of(record, to, group.size) for to in range(group.size)]
    for number in range(max(map(len, pieces))):
        nothing = src.extent.constant, dst.extent.constant, 1  # views are clipped to the tensor
        now = [of[number] if number < len(of) else (to, *nothing) for to, of in enumerate(pieces)]
        sender, begin, first, rows = (
            _number(low, record.axes, (number, field), values) for field, values in enumerate(zip(*now))
        )
        own = Operand(dst.slot, Mode.ROWS, part=first, parts=rows)
        theirs = Operand(src.slot, Mode.ROWS, part=begin, parts=rows, group=group.number, member=sender)
        tiles: Tiles = {"dst": [own], "src": [theirs]}
        low.emit("copy_pairs", over=Number(1), step=0, dtype=dst.dtype, tiles=tiles, label=low.op.label)
    return record


def _pieces_of(record: Collective, to: int, members: int) -> list[_Piece]:
    """The copies of one receiver, in order."""
    step, pieces = max(upper(record.step), 1), []
    for turn in range(members):
        sender = (to + turn) % members
        pair = 2 * (sender * members + to)
        (begin, end), (first, _) = record.parts[pair : pair + 2]
        pieces += [(sender, b, first + b - begin, min(step, end - b)) for b in range(begin, end, step)]
    return pieces


def _number(low: ExchangeLowering, axes: Axes, key: tuple[int, int], values: Sequence[int]) -> NumberLike:
    """A number of each member of the device group; an integer if all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return low.numbers.place(("all_to_all", axes, key), lambda d: values[low.mesh.coordinate(d, *axes)])
