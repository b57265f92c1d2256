"""Counts, before a run, what a device computes and transfers: FLOPs and bytes per kernel, and bytes
read from peers (other devices).

The kernel table has the cost of one call of a kernel as a function of sizes, and the operands of an
instruction give the sizes. All tasks of a program are counted, with every symbol at its bound.
Bytes are those that tasks read and write at least once. Less is read from memory if a tile stays in
a cache between tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.core.dtypes import DTYPES
from tilewise.ir.program import (
    Call,
    DeviceBinding,
    DeviceClass,
    Instruction,
    Mode,
    NumberLike,
    Operand,
    Source,
    TileProgram,
    upper,
)
from tilewise.kernels import KernelSpec, kernel_spec
from tilewise.plan.traffic import peer_of

__all__ = ["DeviceCosts", "KernelCost", "count_costs", "count_flops"]


class KernelCost(NamedTuple):
    """The cost of all calls of a kernel on one device.

    Attributes:
        flops: floating-point operations.
        num_bytes: bytes read and written.
        peer_bytes: the part of `num_bytes` that is read from other devices' memory.
    """

    flops: int
    num_bytes: int
    peer_bytes: int


@dataclass(frozen=True)
class DeviceCosts:
    """The cost of one run of a program on one device.

    Attributes:
        kernels: costs by full name of the kernel, such as `matmul_bf16`.
    """

    kernels: Mapping[str, KernelCost]

    @property
    def flops(self) -> int:
        """Floating-point operations of all kernels."""
        return sum(cost.flops for cost in self.kernels.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(cost.num_bytes for cost in self.kernels.values())

    @property
    def peer_bytes(self) -> int:
        """Bytes that all kernels read from other devices' memory."""
        return sum(cost.peer_bytes for cost in self.kernels.values())


def count_costs(program: TileProgram, device: int, name: str, bounds: tuple[int, ...]) -> DeviceCosts:
    """The cost of one run of a list of calls on one device. It is equal for all devices of its class."""
    own = program.devices[device]
    of = program.classes[own.class_id]
    uses = Counter(call.template for call in of.calls[name])
    cost_of_kernel: dict[str, KernelCost] = {}
    calls = {call.template: call for call in of.calls[name]}  # all calls of a template have equal sizes
    for call in calls.values():
        views = _Views(of, own, call, bounds)
        for instruction in of.templates[call.template].instructions:
            if not instruction.kernel:
                continue
            peers = (o for o in instruction.operands if peer_of(o, own, device) is not None)
            peer_bytes = sum(views.bytes_of(instruction, operand) for operand in peers)
            costs = (*_flops_and_bytes(instruction, views), peer_bytes)
            before = cost_of_kernel.get(instruction.kernel, KernelCost(0, 0, 0))
            cost_of_kernel[instruction.kernel] = KernelCost(
                *(b + uses[call.template] * cost for b, cost in zip(before, costs))
            )
    return DeviceCosts(cost_of_kernel)


def count_flops(program: TileProgram, device: int, name: str, bounds: tuple[int, ...]) -> dict[int, int]:
    """The floating-point operations of one call of each template that a list uses on a device."""
    own = program.devices[device]
    of = program.classes[own.class_id]
    flops = {}
    for call in of.calls[name]:
        if call.template not in flops:
            views = _Views(of, own, call, bounds)
            instructions = (i for i in of.templates[call.template].instructions if i.kernel)
            flops[call.template] = sum(_flops_and_bytes(i, views)[0] for i in instructions)
    return flops


class _Views(NamedTuple):
    """The operands of a call's instructions on a device."""

    of: DeviceClass
    own: DeviceBinding
    call: Call
    bounds: tuple[int, ...]

    def value(self, number: NumberLike) -> int:
        """The value of a number, with every symbol at its bound."""
        if isinstance(number, int):
            return number
        if number.source == Source.DEVICE:
            return number.constant + number.multiple * self.own.numbers[number.which]
        if number.source == Source.CALL:
            return number.constant + number.multiple * self.call.numbers[number.which]
        return number.constant if number.source == Source.POSITION else upper(number, self.bounds)

    def tasks(self, instruction: Instruction) -> list[tuple[int, int]]:
        """Pairs (rows of a task, number of such tasks) of an instruction."""
        rows, step = self.value(instruction.extent), self.value(instruction.step)
        if step <= 0:
            return [(rows, 1)]
        full, rest = divmod(rows, step)
        return [(length, count) for length, count in ((step, full), (rest, 1)) if length and count]

    def shape(self, operand: Operand, length: int) -> tuple[int, int]:
        """Rows and columns of an operand, in a task over this many rows of the loop."""
        entry = self.of.entries[self.call.binding[operand.slot]]
        rows, cols = entry.extent.upper(self.bounds), entry.cols
        match operand.mode:
            case Mode.ROW:
                return -(-length // max(1, self.value(operand.div))), cols
            case Mode.COL | Mode.PANELCOLS:
                return rows, -(-length // max(1, self.value(operand.div)))
            case Mode.ROWPART:
                return -(-length // max(1, self.value(operand.parts))), cols
            case Mode.ROWCOLS:
                return length, self.value(operand.parts)
            case Mode.ROWS:
                return self.value(operand.parts), cols
        return rows, cols

    def bytes_of(self, instruction: Instruction, operand: Operand) -> int:
        """Bytes of an operand, over all tasks of an instruction."""
        itemsize = DTYPES[self.of.entries[self.call.binding[operand.slot]].dtype].itemsize
        tasks = ((self.shape(operand, length), count) for length, count in self.tasks(instruction))
        return sum(rows * cols * count for (rows, cols), count in tasks) * itemsize


def _flops_and_bytes(instruction: Instruction, views: _Views) -> tuple[int, int]:
    """The cost of all tasks of an instruction."""
    spec = kernel_spec(instruction.kernel)
    flops = num_bytes = 0
    # without dy, rows are only added at the ids, not multiplied
    is_lookup = spec.base == "matmul_dw" and instruction.operands[1].null
    for length, count in views.tasks(instruction):
        sizes = _sizes(spec, instruction, views, length)
        num_bytes += count * spec.bytes(sizes)
        flops += count * (spec.flops({**sizes, "n": 1}) if is_lookup else spec.flops(sizes))
    return flops, num_bytes


def _sizes(spec: KernelSpec, instruction: Instruction, views: _Views, length: int) -> dict[str, int]:
    """The dims on which a kernel's costs depend, for one task.

    Their values are sizes of operands, and integer attributes. If the table does not name a dim,
    its value is taken from the largest operand.
    """
    named, num_members = _operands_by_name(spec, instruction.operands)
    sizes: dict[str, int] = {}
    largest = (0, 0)
    for name, operands in named.items():
        shapes = [views.shape(operand, length) for operand in operands if not operand.null]
        largest = max([largest, *shapes], key=lambda shape: shape[0] * shape[1])
        wanted = next(o for o in spec.operands if o.name == name).sizes
        for place, size in enumerate(wanted):
            if shapes and size != "_" and not size.isdigit() and size not in sizes:
                values = [shape[place] for shape in shapes]
                sizes[size] = sum(values) if size.endswith("*") else values[0]
    ints = iter(instruction.ints)
    for integer in spec.ints:
        if integer.is_list:
            break
        sizes[integer.name] = views.value(next(ints))
    other = {
        "m": sizes.get("t", largest[0]),
        "d": sizes.get("v", largest[1]),
        "k": sizes.get("k*", 0),
        "seq": sizes.get("seq_len", 0),
        "inputs": num_members,
        "states": num_members,
        "steps": sizes.get("num_steps", 0),
        "item": DTYPES[instruction.kernel.rpartition("_")[2]].itemsize if len(spec.names) > 1 else 4,
    }
    return {**other, **sizes}


def _operands_by_name(spec: KernelSpec, operands: Sequence[Operand]) -> tuple[dict[str, list[Operand]], int]:
    """An instruction's operands by the table's names, and the length of its lists."""
    num_lists = sum(o.is_list for o in spec.operands)
    num_members = (len(operands) - len(spec.operands) + num_lists) // max(1, num_lists)
    by_name: dict[str, list[Operand]] = {o.name: [] for o in spec.operands}
    left = iter(operands)
    for is_list, members in spec.operand_groups:
        for _ in range(num_members if is_list else 1):
            for member in members:
                by_name[member.name].append(next(left))
    return by_name, num_members
