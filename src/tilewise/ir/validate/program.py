"""The rule of exchange in a tile program: a device that reads a peer's tile tells the peer when it is done.

Deadlock is checked natively (`Program.finish`); this is the other half, that memory is not written again too early.
"""

from __future__ import annotations

from tilewise.core.errors import InternalError
from tilewise.ir.program import Access, DeviceBinding, Instruction, LoweredTemplate, TileProgram, value_on

__all__ = ["validate_acknowledgements"]


def validate_acknowledgements(program: TileProgram) -> None:
    """In one template: every read of a peer's tensor raises a signal that a task of the peer waits for while it holds
    the same tensor. So the tensor's next writer waits for the reader.

    One device of each class is asked, of each class of peers. What a broadcast copies is read without a signal: no
    device writes it in that program.

    Raises:
        InternalError: names the reader, its device and the tensor.
    """
    asked: set[int] = set()
    for device, own in enumerate(program.devices):
        if own.class_id in asked:
            continue
        asked.add(own.class_id)
        for number, template in enumerate(program.classes[own.class_id].templates):
            if template.signal_sites:
                _validate_template(program, device, number)


def _validate_template(program: TileProgram, device: int, number: int) -> None:
    own = program.devices[device]
    template = program.classes[own.class_id].templates[number]
    for reader in template.instructions:
        known: set[tuple[int, int]] = set()
        for operand in reader.operands:
            if operand.team < 0 or operand.null:
                continue
            peer = own.teams[operand.team][value_on(operand.member, own)]
            theirs = program.devices[peer]
            if peer == device or (theirs.class_id, operand.slot) in known:
                continue
            known.add((theirs.class_id, operand.slot))
            key = template.slots[operand.slot]
            other = program.classes[theirs.class_id].templates[number]
            if not _is_awaited(reader, own, peer, theirs, other, key):
                raise InternalError(
                    f"[ir.validate] a peer's tile is acknowledged when it has been read; got none for {key} of "
                    f"device {peer}, read by {reader.label!r} on device {device}; please report the plan"
                )


def _is_awaited(
    reader: Instruction,
    own: DeviceBinding,
    peer: int,
    theirs: DeviceBinding,
    template: LoweredTemplate,
    key: object,
) -> bool:
    raised = {
        (value_on(n.signal_base, own), n.per_index)
        for n in reader.notifies
        if own.teams[n.team][value_on(n.member, own)] == peer
    }
    for task in template.instructions:
        waits = any(
            (value_on(w.signal_base, theirs), w.per_index) in raised and w.increment != 0 for w in task.waits
        )
        holds = any(
            template.slots[o.slot] == key and o.team < 0 and o.access != Access.NONE for o in task.operands
        )
        if waits and holds:
            return True
    return False
