"""The rule of exchange in a tile program: a device that has read a peer's tile posts a signal to
the peer.

A peer is another device of the same device group. The rule prevents memory from being overwritten
too early. That the program cannot deadlock is checked by native code (`Program.finish`).
"""

from __future__ import annotations

from tilewise.core.errors import InternalError
from tilewise.ir.program import (
    Access,
    DeviceBinding,
    Instruction,
    LoweredTemplate,
    Slot,
    TileProgram,
    Wait,
    value_on,
)

__all__ = ["validate_acknowledgements"]

_Signals = set[tuple[int, bool]]
_Waits = dict[Slot, list[Wait]]


def validate_acknowledgements(program: TileProgram) -> None:
    """Check, per template, that every read of a peer's tensor posts a signal, and that a task of
    the peer that reads or writes the same tensor waits for this signal. Then the tensor's next
    writer waits for the reader.

    One device of each class is checked against each class of peers. A broadcast reads without a
    signal, because no device writes that tensor in its program.

    Raises:
        InternalError: names the reader, its device and the tensor.
    """
    asked: set[int] = set()
    for device, own in enumerate(program.devices):
        if own.class_id in asked:
            continue
        asked.add(own.class_id)
        for number, template in enumerate(program.classes[own.class_id].templates):
            if template.signal_ranges:
                _validate_template(program, device, number)


def _validate_template(program: TileProgram, device: int, number: int) -> None:
    own = program.devices[device]
    template = program.classes[own.class_id].templates[number]
    waits_by_class: dict[int, _Waits] = {}  # per class of peers
    awaited: dict[tuple[int, Slot], _Signals] = {}  # per peer
    # a tile program is checked as a whole, and no device leaves it before all others have
    programs = [range(c.first, c.last) for c in template.collectives if c.kind == "tile_program"]
    for number_of_reader, reader in enumerate(template.instructions):
        if any(number_of_reader in instructions for instructions in programs):
            continue
        checked: set[tuple[int, int]] = set()
        for operand in reader.operands:
            if operand.group < 0 or operand.null:
                continue
            peer = own.groups[operand.group][value_on(operand.member, own)]
            theirs = program.devices[peer]
            if peer == device or (theirs.class_id, operand.slot) in checked:
                continue
            checked.add((theirs.class_id, operand.slot))
            key = _tensor_of(template.slots[operand.slot])
            if theirs.class_id not in waits_by_class:
                waits_by_class[theirs.class_id] = _waits_of(
                    program.classes[theirs.class_id].templates[number]
                )
            if (peer, key) not in awaited:
                waits = waits_by_class[theirs.class_id].get(key, ())
                awaited[peer, key] = {(value_on(w.signal_base, theirs), w.per_index) for w in waits}
            if awaited[peer, key].isdisjoint(_posted(reader, own, peer)):
                raise InternalError(
                    f"[ir.validate] a read of a peer's tile must be acknowledged; got no acknowledgement for {key} of "
                    f"device {peer}, read by {reader.label!r} on device {device}; please report the plan"
                )


def _posted(reader: Instruction, own: DeviceBinding, peer: int) -> _Signals:
    """The signals that an instruction of a device posts on a peer, and whether it posts one per
    iteration.
    """
    return {
        (value_on(n.signal_base, own), n.per_index)
        for n in reader.notifies
        if own.groups[n.group][value_on(n.member, own)] == peer
    }


def _waits_of(template: LoweredTemplate) -> _Waits:
    """Per tensor, the waits of the tasks that hold or write it."""
    waits_by_slot: _Waits = {}
    for task in template.instructions:
        waits = [w for w in task.waits if w.increment != 0]
        if waits:
            own = [o for o in task.operands if o.group < 0 and o.access != Access.NONE]
            memory = {_tensor_of(template.slots[o.slot]) for o in own}
            for slot in memory:
                waits_by_slot.setdefault(slot, []).extend(waits)
    return waits_by_slot


def _tensor_of(slot: Slot) -> Slot:
    """The slot of a tensor's memory, in any microbatch: a sender also stores the tensor of the microbatch before."""
    memory = slot.memory
    return memory._replace(level=0) if memory.kind == "tensor" else memory
