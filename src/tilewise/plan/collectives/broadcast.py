"""Broadcast: copies what the host wrote into the memory of one device to all other devices that
store the same part of a tensor.

No signals are needed, because no device writes memory that another device reads meanwhile.
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
    """Instructions that copy whole tensors. A tensor is given as (name, view with its slot, place
    of the source in the device group).
    """
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
