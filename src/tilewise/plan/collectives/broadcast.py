"""Broadcast: copies what the host wrote on one device to the other devices that hold the same part.

No signals are needed, because no device writes what others read.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.lowering import Ref
from tilewise.ir.program import Instruction, Mode, NumberLike, Operand
from tilewise.plan.emission import make_instruction

__all__ = ["broadcast_instructions"]


def broadcast_instructions(
    tensors: Sequence[tuple[str, Ref, NumberLike]], group: int
) -> tuple[Instruction, ...]:
    """Copies of whole tensors: (name, view with its slot, place of the source in a device group)."""
    refs = {ref.slot: ref for _, ref, _ in tensors}
    return tuple(
        make_instruction(
            "copy_pairs",
            maker="the broadcast",
            label=f"broadcast:{name}",
            extent=ref.extent,
            step=ref.tile_rows,
            dtype=ref.dtype,
            tiles={
                "dst": [Operand(ref.slot, Mode.ROW)],
                "src": [Operand(ref.slot, Mode.ROW, group=group, member=source)],
            },
            ref_of=refs.__getitem__,
        ).freeze()
        for name, ref, source in tensors
    )
