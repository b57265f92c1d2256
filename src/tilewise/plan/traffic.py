"""Counts, before a run, the elements that devices read from and write to each other's memory. The
runtime must count the same numbers.

Devices of one class run the same instructions and differ only in numbers. So a class is counted
once, and each count is a vector over its devices. Calls whose tensors have the same sizes are
counted once, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import DTYPES
from tilewise.ir.program import (
    Access,
    Call,
    DeviceBinding,
    Instruction,
    Mode,
    NumberLike,
    Operand,
    TileProgram,
    upper,
    value_on,
)

__all__ = ["TrafficCounter", "count_file_traffic", "count_traffic", "peer_of"]

_Vector = NDArray[np.int64]


def count_traffic(program: TileProgram, name: str, bounds: tuple[int, ...]) -> dict[str, list[int]]:
    """Elements read from and written to peers (other devices), per label and device, with every symbol
    at its bound.

    Args:
        program: the program of all devices.
        name: name of the list of calls to run, such as `step`.
        bounds: upper bounds of the symbols.
    """
    total: dict[str, _Vector] = {}
    for class_id, of in enumerate(program.classes):
        devices = [d for d, own in enumerate(program.devices) if own.class_id == class_id]
        for label, moved in TrafficCounter(program, devices, bounds).count(of.calls[name]).items():
            whole = total.setdefault(label, np.zeros(len(program.devices), np.int64))
            whole[devices] = moved
    return {label: moved.tolist() for label, moved in total.items()}


class TrafficCounter:
    """Counts the elements that devices of one class read from and write to other devices.

    Args:
        program: the program of all devices.
        devices: the devices of one class.
        bounds: upper bounds of the symbols.
    """

    def __init__(self, program: TileProgram, devices: Sequence[int], bounds: tuple[int, ...]) -> None:
        bindings = [program.devices[d] for d in devices]
        self._devices = np.array(devices)
        self._bounds = bounds
        self._numbers = np.array([own.numbers for own in bindings], np.int64).reshape(len(devices), -1)
        self._groups = [np.array(group) for group in zip(*(own.groups for own in bindings))]
        self._classes = program.classes
        self._class_of = np.array([own.class_id for own in program.devices])
        self._peer_classes = sorted(
            {int(c) for group in self._groups for c in self._class_of[np.unique(group)]}
        )
        self._templates = program.classes[bindings[0].class_id].templates
        self._peers_of: dict[tuple[int, NumberLike], tuple[_Vector, _Vector]] = {}
        # per template, operands that may be a peer's memory
        self._remote: dict[int, list[tuple[Instruction, Operand]]] = {}
        # per entry, rows and columns on the peers' classes
        self._sizes: dict[int, tuple[tuple[int, int], ...]] = {}

    def count(self, calls: Iterable[Call]) -> dict[str, _Vector]:
        """Elements per label and device, in the order of the devices.

        Args:
            calls: calls of the class.
        """
        alike: Counter[tuple[int, tuple[int, ...], tuple[object, ...]]] = Counter()
        first: dict[tuple[int, tuple[object, ...]], tuple[int, ...]] = {}
        for call in calls:
            slots = {operand.slot for _, operand in self._remote_of(call.template)}
            sizes = tuple(self._sizes_of(call.binding[slot]) for slot in sorted(slots))
            binding = first.setdefault((call.template, sizes), tuple(call.binding))
            alike[call.template, binding, sizes] += 1
        total: dict[str, _Vector] = {}
        for (template, binding, _), times in alike.items():
            for instruction, operand in self._remote_of(template):
                moved = times * self._elements(instruction, operand, self._sizes_of(binding[operand.slot]))
                total[instruction.label] = total.get(instruction.label, 0) + moved
        return total

    def _remote_of(self, template: int) -> list[tuple[Instruction, Operand]]:
        if template not in self._remote:
            self._remote[template] = [
                (instruction, operand)
                for instruction in self._templates[template].instructions
                for operand in instruction.operands
                if operand.group >= 0
            ]
        return self._remote[template]

    def _sizes_of(self, entry: int) -> tuple[tuple[int, int], ...]:
        if entry not in self._sizes:
            entries = (self._classes[c].entries[entry] for c in self._peer_classes)
            self._sizes[entry] = tuple((e.extent.upper(self._bounds), e.cols) for e in entries)
        return self._sizes[entry]

    def _value(self, number: NumberLike) -> _Vector:
        """The value of a constant or a number of the device, on every device."""
        if isinstance(number, int) or not number.source:
            return np.full(len(self._devices), upper(number), np.int64)
        return number.constant + number.multiple * self._numbers[:, number.which]

    def _elements(
        self, instruction: Instruction, operand: Operand, sizes: tuple[tuple[int, int], ...]
    ) -> _Vector:
        """Elements that one operand reads or writes; both count if it does both. 0 on a device whose own
        memory it is.
        """
        peers, places = self._peers(operand.group, operand.member)
        peer_rows, peer_cols = np.array(sizes, np.int64)[places].T
        extent = instruction.extent.upper(self._bounds)
        if operand.mode == Mode.WHOLE:
            moved = peer_rows * peer_cols
        else:
            moved = self._rows(instruction, operand, extent)
            moved = moved * (self._value(operand.parts) if operand.mode == Mode.ROWCOLS else peer_cols)
        times = 2 if (operand.role or operand.access) == Access.INOUT else 1
        return np.where(peers == self._devices, 0, times * moved)

    def _peers(self, group: int, member: NumberLike) -> tuple[_Vector, _Vector]:
        """Per device, the member of a device group, and the index of the member's class among the
        classes of all peers.
        """
        key = group, member
        if key not in self._peers_of:
            peers = self._groups[group][np.arange(len(self._devices)), self._value(member)]
            self._peers_of[key] = peers, np.searchsorted(self._peer_classes, self._class_of[peers])
        return self._peers_of[key]

    def _rows(self, instruction: Instruction, operand: Operand, extent: int) -> _Vector:
        if operand.mode != Mode.ROWPART:
            return np.full(len(self._devices), extent, np.int64)
        step = max(upper(instruction.step, self._bounds) or extent, 1)
        part, parts = self._value(operand.part), self._value(operand.parts)

        def share(length: int) -> _Vector:
            return length * (part + 1) // parts - length * part // parts

        return extent // step * share(step) + share(extent % step)


def count_file_traffic(
    program: TileProgram, device: int, name: str, bounds: tuple[int, ...]
) -> tuple[int, int]:
    """Bytes that a device reads from its file and writes to it."""
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
    """The other device in whose memory an operand is; None if the operand is in the device's own
    memory.
    """
    if operand.group < 0:
        return None
    peer = own.groups[operand.group][value_on(operand.member, own)]
    return None if peer == device else peer
