"""The rule of exchange in a tile program: a device that reads a peer's tile tells the peer when it is done.

Deadlock is checked natively (`Program.finish`); this is the other half, that memory is not written again too early.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.errors import InternalError
from tilewise.ir.program import Access, Instruction, LoweredTemplate, upper

__all__ = ["validate_acknowledgements"]


def validate_acknowledgements(templates: Sequence[LoweredTemplate]) -> None:
    """In one template, given for all devices: every read of a peer's tensor raises a signal that a task of the peer
    waits for while it holds the same tensor. So the tensor's next writer waits for the reader.

    Raises:
        InternalError: names the reader, its device and the tensor.
    """
    for device, template in enumerate(templates):
        for reader in template.instructions:
            for operand in reader.operands:
                peer = upper(operand.member)
                if operand.team < 0 or peer == device or operand.null:
                    continue
                key = template.slots[operand.slot]
                if not _is_awaited(reader, peer, templates[peer], key):
                    raise InternalError(
                        f"[ir.validate] a peer's tile is acknowledged when it has been read; got none for {key} of "
                        f"device {peer}, read by {reader.label!r} on device {device}; please report the plan"
                    )


def _is_awaited(reader: Instruction, peer: int, template: LoweredTemplate, key: object) -> bool:
    raised = {(n.signal_base, n.per_index) for n in reader.notifies if n.member == peer}
    for task in template.instructions:
        waits = any((w.signal_base, w.per_index) in raised and upper(w.increment) > 0 for w in task.waits)
        holds = any(
            template.slots[o.slot] == key and o.team < 0 and o.access != Access.NONE for o in task.operands
        )
        if waits and holds:
            return True
    return False
