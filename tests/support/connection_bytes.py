"""Bytes that a run's tasks read from devices of other hosts, from the plan."""

from dataclasses import replace

from tilewise.core.dtypes import DTYPES
from tilewise.plan.traffic import TrafficCounter, peer_of

__all__ = ["planned_bytes"]


def planned_bytes(plan, hosts, name="step"):
    """Bytes of operands on other hosts' devices in one run of a program; `hosts` has the host of each device."""
    program, total = plan.program, 0
    for device, own in enumerate(program.devices):
        of = program.classes[own.class_id]
        for call in of.calls[name]:
            for instruction in of.templates[call.template].instructions:
                for operand in instruction.operands:
                    peer = peer_of(operand, own, device)
                    if peer is not None and hosts[peer] != hosts[device]:
                        entry = program.classes[program.devices[peer].class_id].entries[
                            call.binding[operand.slot]
                        ]
                        elements = _elements(program, device, call, replace(instruction, operands=(operand,)))
                        total += elements * DTYPES[entry.dtype].itemsize
    return total


def _elements(program, device, call, instruction):
    """Of one instruction, counted as the plan counts them."""
    number = program.devices[device].class_id
    of = program.classes[number]
    template = replace(of.templates[call.template], instructions=(instruction,))
    alone = replace(of, templates=(template,))
    classes = (*program.classes[:number], alone, *program.classes[number + 1 :])
    only = replace(program, classes=classes)
    counts = TrafficCounter(only, [device], ()).count([replace(call, template=0)])
    return sum(int(elements[0]) for elements in counts.values())
