"""Instructions over tensors in files: each block is fetched into memory, processed, and stored.

    fetch b        into place b mod depth of a temporary per tensor, after the block that was there is stored
    the kernel     over the block's rows
    store b        what the kernel has written

The temporary has `depth` places, one per block. Fetches run ahead by as many blocks as there are
places, so the disk works while the kernel computes. Memory use is that of `depth` blocks per tensor
and does not depend on the size of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import InternalError
from tilewise.ir.lowering import Draft, Ref, Tiles
from tilewise.ir.program import Access, Mode, Number, Operand
from tilewise.kernels import KERNELS
from tilewise.plan.memory import FILE_PAGE
from tilewise.plan.shapes import round_up

if TYPE_CHECKING:
    from tilewise.plan.lower.template import TemplateLowering

__all__ = ["emit_by_blocks", "operands_of"]

DEPTH = 6


def emit_by_blocks(
    low: TemplateLowering, kernel: str, over: Ref | Number, tiles: Tiles, emit: Callable[..., Draft]
) -> Draft:
    """Append the instructions for a kernel some of whose operands are in files.

    Args:
        low: receives the instructions.
        kernel: base name in the table.
        over: the rows of the loop.
        tiles: the operands: each is the rows of the loop, or a whole tensor in memory.
        emit: `low.emit` with all arguments but `over` and `tiles`. Appends the kernel on one block.

    Raises:
        InternalError: an operand in a file is not the rows of the loop.
    """
    roles = {spec.name: spec.role for spec in KERNELS[kernel].operands}
    moved: dict[int, Ref] = {}  # by slot of a tensor in a file: its places in memory
    most_rows = low.rows_max(over) if isinstance(over, Ref) else over.constant
    block = most_rows
    for name, operand in operands_of(tiles):
        ref = low.views[operand.slot]
        if low.is_in_file(ref):
            if operand.mode != Mode.ROW or operand.div != 1 or operand.group >= 0:
                raise InternalError(
                    f"[plan.lower] operands in a file must be rows of the loop, or be fetched first; got {name!r} "
                    f"of {kernel!r} in {low.op.label!r}; please report the op"
                )
            assert isinstance(ref.tile_rows, int)
            moved[operand.slot], block = ref, min(block, ref.tile_rows)
    count = -(-most_rows // block)
    depth = min(count, DEPTH)
    for slot, ref in moved.items():
        size = depth * block * ref.cols * dtype_named(ref.dtype).itemsize
        moved[slot] = low.temp(
            depth * block,
            ref.cols,
            ref.dtype,
            tile_rows=block,
            name="blocks",
            max_bytes=round_up(size, FILE_PAGE),
        )
    written = {o.slot for name, o in operands_of(tiles) if o.slot in moved and roles[name] != "in"}
    rows = over.extent.constant if isinstance(over, Ref) else over.constant
    draft = None

    def move(kind: str, slot: int, number: int) -> None:
        first = number * block
        in_file = Operand(slot, Mode.ROWPART, offset=first)
        in_memory = Operand(moved[slot].slot, Mode.ROWPART, offset=number % depth * block)
        ends = (in_memory, in_file) if kind == "fetch" else (in_file, in_memory)
        low.emit(
            kind,
            over=Number(max(min(block, rows - first), 0)),
            step=0,
            dtype=moved[slot].dtype,
            tiles={"out": ends[0], "x": ends[1]},
            priority=2,
            label=f"{low.op.label}/{kind}",
        )

    for turn in range(count + depth - 1):
        if turn < count:
            for slot in sorted(moved):  # also if it is only written, because a kernel may leave it unchanged
                move("fetch", slot, turn)
        number = turn - depth + 1
        if number < 0:
            continue
        own = _on_block(tiles, moved, number * block, number % depth * block)
        draft = emit(over=Number(max(min(block, rows - number * block), 0)), tiles=own)
        for slot in sorted(written):
            move("store", slot, number)
    assert draft is not None
    return draft


def operands_of(tiles: Tiles) -> list[tuple[str, Operand]]:
    """All operands with their names in the kernel table."""
    return [
        (name, operand)
        for name, value in tiles.items()
        for operand in ([value] if isinstance(value, Operand) else value or ())
    ]


def _on_block(tiles: Tiles, moved: dict[int, Ref], first: int, place: int) -> Tiles:
    """The operands for a loop over one block."""

    def part(operand: Operand) -> Operand:
        if operand.slot in moved:
            return Operand(moved[operand.slot].slot, Mode.ROWPART, Access.NONE, offset=place)
        if operand.mode == Mode.ROW and operand.div == 1:
            return operand._replace(mode=Mode.ROWPART, offset=first)
        return operand

    made: dict[str, Operand | Sequence[Operand] | None] = {}
    for name, value in tiles.items():
        if value is None or isinstance(value, Operand):
            made[name] = None if value is None else part(value)
        else:
            made[name] = [part(operand) for operand in value]
    return made
