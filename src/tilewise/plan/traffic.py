"""Counting, before anything runs, what devices read from each other: the figures the runtime must count too."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.program import DeviceProgram, Instruction, Mode, Operand, TensorEntry, upper

__all__ = ["Traffic", "count_traffic"]

Traffic = dict[str, list[int]]


def count_traffic(programs: Sequence[DeviceProgram], bounds: tuple[int, ...]) -> Traffic:
    """Elements read from peers per label and device, with every symbol at its bound."""
    total: Traffic = {}
    for device, program in enumerate(programs):
        for call in program.calls:
            for instruction in program.templates[call.template].instructions:
                moved = sum(
                    _elements(instruction, o, programs[upper(o.member)].entries[call.binding[o.slot]], bounds)
                    for o in instruction.operands
                    if o.team >= 0
                )
                if moved:
                    total.setdefault(instruction.label, [0] * len(programs))[device] += moved
    return total


def _elements(instruction: Instruction, operand: Operand, entry: TensorEntry, bounds: tuple[int, ...]) -> int:
    extent = instruction.extent.upper(bounds)
    if operand.mode == Mode.WHOLE:
        return entry.extent.upper(bounds) * entry.cols
    step = upper(instruction.step, bounds) or extent
    rows = 0
    for begin in range(0, extent, max(step, 1)):
        length = min(step, extent - begin)
        if operand.mode == Mode.ROWPART:
            part, parts = upper(operand.part), upper(operand.parts)
            rows += length * (part + 1) // parts - length * part // parts
        else:
            rows += length
    return rows * entry.cols
