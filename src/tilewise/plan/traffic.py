"""Counting, before anything runs, what devices read from each other: the figures the runtime must count too."""

from __future__ import annotations

from tilewise.core.dtypes import DTYPES
from tilewise.ir.program import (
    Call,
    DeviceBinding,
    Instruction,
    Mode,
    Operand,
    TensorEntry,
    TileProgram,
    upper,
    value_on,
)

__all__ = [
    "Traffic",
    "count_call_traffic",
    "count_device_traffic",
    "count_file_traffic",
    "count_traffic",
    "peer_of",
]

Traffic = dict[str, list[int]]


def count_traffic(program: TileProgram, name: str, bounds: tuple[int, ...]) -> Traffic:
    """Elements read from peers per label and device, with every symbol at its bound."""
    total: Traffic = {}
    for device in range(len(program.devices)):
        for label, moved in count_device_traffic(program, device, name, bounds).items():
            total.setdefault(label, [0] * len(program.devices))[device] = moved
    return total


def count_device_traffic(
    program: TileProgram, device: int, name: str, bounds: tuple[int, ...]
) -> dict[str, int]:
    """The same of one device; equal for all devices of its class."""
    total: dict[str, int] = {}
    for call in program.classes[program.devices[device].class_id].calls[name]:
        for label, moved in count_call_traffic(program, device, call, bounds).items():
            total[label] = total.get(label, 0) + moved
    return total


def count_call_traffic(
    program: TileProgram, device: int, call: Call, bounds: tuple[int, ...]
) -> dict[str, int]:
    """The same of one call."""
    total: dict[str, int] = {}
    own = program.devices[device]
    of = program.classes[own.class_id]
    for instruction in of.templates[call.template].instructions:
        for operand in instruction.operands:
            peer = peer_of(operand, own, device)
            if peer is not None:
                theirs = program.classes[program.devices[peer].class_id]
                entry = theirs.entries[call.binding[operand.slot]]
                moved = _elements(instruction, operand, entry, own, bounds)
                total[instruction.label] = total.get(instruction.label, 0) + moved
    return total


def count_file_traffic(
    program: TileProgram, device: int, name: str, bounds: tuple[int, ...]
) -> tuple[int, int]:
    """Bytes that a device reads from its file, and writes to it."""
    of = program.classes[program.devices[device].class_id]
    moved = {"fetch": 0, "store": 0}
    for call in of.calls[name]:
        for instruction in of.templates[call.template].instructions:
            kind = instruction.kernel.partition("_")[0]
            if kind in moved:
                entry = of.entries[call.binding[instruction.operands[0].slot]]
                row_bytes = entry.stride * DTYPES[entry.dtype].itemsize
                moved[kind] += instruction.extent.upper(bounds) * row_bytes
    return moved["fetch"], moved["store"]


def peer_of(operand: Operand, own: DeviceBinding, device: int) -> int | None:
    """The other device whose memory an operand is; None where it is the device's own."""
    if operand.team < 0:
        return None
    peer = own.teams[operand.team][value_on(operand.member, own)]
    return None if peer == device else peer


def _elements(
    instruction: Instruction,
    operand: Operand,
    entry: TensorEntry,
    own: DeviceBinding,
    bounds: tuple[int, ...],
) -> int:
    extent = instruction.extent.upper(bounds)
    if operand.mode == Mode.WHOLE:
        return entry.extent.upper(bounds) * entry.cols
    step = upper(instruction.step, bounds) or extent
    rows = 0
    for begin in range(0, extent, max(step, 1)):
        length = min(step, extent - begin)
        if operand.mode == Mode.ROWPART:
            part, parts = value_on(operand.part, own), value_on(operand.parts, own)
            rows += length * (part + 1) // parts - length * part // parts
        else:
            rows += length
    return rows * (value_on(operand.parts, own) if operand.mode == Mode.ROWCOLS else entry.cols)
