"""Checks the tile program of a plan from a file: numbers refer to existing objects, memory lies in
the arena, loops end.

Classes and calls share entries and instructions, so each object is checked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import isfinite

from tilewise.core.dtypes import DTYPES
from tilewise.ir.file import require
from tilewise.ir.graph import PANEL_ROWS
from tilewise.ir.program import (
    Call,
    DeviceBinding,
    DeviceClass,
    Instruction,
    LoweredTemplate,
    Mode,
    Number,
    NumberLike,
    Source,
    TensorEntry,
    TileProgram,
)
from tilewise.kernels.table import kernel_spec
from tilewise.plan.tables import PlanTables

__all__ = ["require_program"]

_MOST = 1 << 40  # of a constant, a factor or a value; where products are used, they fit in 62 bits
_MOST_PRODUCT = 1 << 61
_MOST_TASKS = 1 << 24  # of one instruction
_MODES = range(len(Mode))
_BEFORE_RUN = (Source.NOTHING, Source.SYMBOL)  # sources of numbers that are known before a run


def require_program(plan: PlanTables) -> None:
    """Reject a program with numbers outside of its tables.

    Raises:
        Unreadable: names the table and the number.
    """
    program, mesh = plan.program, plan.mesh
    require(len(program.devices) == mesh.num_devices, f"it has {len(program.devices)} devices on {mesh}")
    require(
        1 <= len(program.classes) <= mesh.num_devices, f"it has {len(program.classes)} classes of devices"
    )
    first = program.classes[0]
    names = list(first.calls)
    require(bool(names), "it has no calls")
    for of in program.classes:
        alike = (len(of.templates), len(of.entries), list(of.calls))
        require(
            alike == (len(first.templates), len(first.entries), names), "its classes must have equal tables"
        )
    sizes = (
        {len(first.templates), len(first.templates) - 1} if mesh.num_devices > 1 else {len(first.templates)}
    )
    require(
        len(plan.layouts) in sizes, f"it has {len(plan.layouts)} layouts for {len(first.templates)} templates"
    )
    checks = _Checks(plan)
    for class_id, of in enumerate(program.classes):
        checks.require_class(of)
        checks.require_devices(of, [d for d in program.devices if d.class_id == class_id])


class _Checks:
    """The objects that were checked, and the values that numbers may have."""

    def __init__(self, plan: PlanTables) -> None:
        self.plan = plan
        self.bounds = plan.symbol_bounds
        self.seen: set[int] = set()
        self.most = _most_values(plan.program, self.bounds)

    def is_new(self, thing: object) -> bool:
        """Whether a part of the plan has not been checked yet."""
        if id(thing) in self.seen:
            return False
        self.seen.add(id(thing))
        return True

    def require_class(self, of: DeviceClass) -> None:
        """Check entries, aliases, templates and calls of one class."""
        for number, entry in enumerate(of.entries):
            if self.is_new(entry):
                self._require_entry(number, entry)
        entry_numbers = range(len(of.entries))
        if self.is_new(of.aliases):
            for number, others in of.aliases.items():
                require(
                    number in entry_numbers and all(o in entry_numbers for o in others),
                    "entry {} has invalid aliases",
                    number,
                )
        for template in of.templates:
            if self.is_new(template):
                self._require_template(template)
        for name, calls in of.calls.items():
            for call in calls:
                self._require_call(name, call, of)

    def require_devices(self, of: DeviceClass, devices: Sequence[DeviceBinding]) -> None:
        """Check the device groups of a class's devices, and how its instructions use their numbers."""
        numbers = range(len(self.plan.program.devices))
        sizes = {(len(d.numbers), *map(len, d.groups)) for d in devices}
        require(len(sizes) == 1, "devices of one class must have equally many numbers and device groups")
        for group in (group for d in devices for group in d.groups):
            if self.is_new(group):
                fits = all(d in numbers for d in group) and len(set(group)) == len(group)
                require(fits, "{} is no device group of its {} devices", group, len(numbers))
        (_, *groups) = sizes.pop()
        ranges = [(min(values), max(values)) for values in zip(*(d.numbers for d in devices))]
        peers, divisors = _asked_of_devices(of)
        for number, member in peers:
            low, high = _range(member, ranges)
            fits = 0 <= number < len(groups) and low >= 0 and high < groups[number]
            require(fits, "a device has no member {} in device group {}", member, number)
        for divisor in divisors:
            require(
                _range(divisor, ranges)[0] >= 1, "a device divides by {}, which must be at least 1", divisor
            )

    def _require_call(self, name: str, call: Call, of: DeviceClass) -> None:
        require(
            0 <= call.template < len(of.templates), f"a call in {name!r} refers to template {call.template}"
        )
        slots, bound = of.templates[call.template].slots, call.binding
        fits = len(bound) == len(slots) and (not bound or (min(bound) >= 0 and max(bound) < len(of.entries)))
        require(fits, f"a call of {of.templates[call.template].name!r} in {name!r} binds other slots")

    def _require_entry(self, number: int, entry: TensorEntry) -> None:
        where = "entry", number, entry.key
        require(entry.dtype in DTYPES and bool(entry.key), "{} has elements of {!r}", where, entry.dtype)
        require(isinstance(entry.key[0], str), "{} has no kind", where)
        rows, step = self._symbolic(where, entry.extent), self._symbolic(where, entry.tile_rows)
        sizes = (entry.offset, entry.cols, entry.stride, entry.first_handle, rows, step - 1, entry.tile_cols)
        require(all(0 <= s <= _MOST_PRODUCT for s in sizes), "{} has sizes out of range", where)
        is_cut = entry.tile_cols == 1 or entry.tile_cols % PANEL_ROWS == 0
        is_cut = is_cut and (not entry.tile_cols or entry.tile_cols < entry.cols)
        require(is_cut, "{} has tiles of {} columns", where, entry.tile_cols)
        elements = (rows - 1) * entry.stride + entry.cols if rows else 0
        end = entry.offset + elements * DTYPES[entry.dtype].itemsize
        plan = self.plan
        last = plan.arena_bytes if entry.offset < plan.file_begin else plan.file_begin + plan.file_bytes
        require(end <= last, "{} ends at byte {} of {}", where, end, last)
        tiles = entry.first_handle + -(-rows // step) * entry.tiles_across
        require(
            tiles <= self.plan.num_handles,
            "{} uses {} handles of {}",
            where,
            tiles,
            self.plan.num_handles,
        )

    def _symbolic(self, where: object, number: NumberLike) -> int:
        """The value of a number of symbols at their bounds."""
        if isinstance(number, int):
            return number
        is_known = number.source == Source.NOTHING or (
            number.source == Source.SYMBOL and 0 <= number.which < len(self.bounds)
        )
        require(is_known, "{} depends on {}", where, number)
        return number.upper(self.bounds)

    def _require_template(self, template: LoweredTemplate) -> None:
        slots = range(len(template.slots))
        counts = (*template.signal_ranges, *template.ring_signal_ranges, template.first_signal)
        require(
            all(0 <= n <= _MOST for n in counts),
            "template {!r} has signals out of range",
            template.name,
        )
        for c in template.reductions:
            ends = (c.source, c.target, *(s for s in (c.residual, c.stack) if s != -1))
            require(all(s in slots for s in ends), "{} of {!r} refers to other slots", c, template.name)
            require(
                (c.stack == -1) == (c.microbatch == -1),
                "{} of {!r} must have both a stack and a microbatch, or neither",
                c,
                template.name,
            )
        for instruction in template.instructions:
            if self.is_new(instruction):
                self._require_instruction(instruction)
            used = [o.slot for o in instruction.operands if not o.null]
            used += [w.slot for w in instruction.waits if w.slot != -1]
            used += [n.slot for n in instruction.notifies if n.slot != -1]
            require(all(s in slots for s in used), "{!r} refers to other slots", instruction.label)

    def _require_instruction(self, instruction: Instruction) -> None:
        where = repr(instruction.label)
        if instruction.kernel:
            kernel_spec(instruction.kernel)
        require(abs(instruction.priority) <= 1 << 20, "{} has priority {}", where, instruction.priority)
        require(all(map(isfinite, instruction.floats)), "{} has floats that are not finite", where)
        numbers: list[NumberLike] = [instruction.extent, instruction.step]
        for o in instruction.operands:
            require(o.mode in _MODES, "{} has an operand of mode {}", where, o.mode)
            numbers += (o.member, o.div, o.part, o.parts, o.offset)
        for w in instruction.waits:
            numbers += (w.member, w.signal_base, w.increment, w.use)
        for n in instruction.notifies:
            numbers += (n.member, n.signal_base, n.use)
        for number in numbers:
            self._require_number(where, number, _MOST)
        for number in (instruction.extent, instruction.step):
            require(isinstance(number, int) or number.source in _BEFORE_RUN, "{} runs over {}", where, number)
        for number in instruction.ints:
            self._require_number(where, number, _MOST_PRODUCT)
        tasks = self._most_tasks(instruction.extent, instruction.step)
        require(tasks <= _MOST_TASKS, "{} is {} tasks", where, tasks)
        bases = (
            *((w.signal_base, w.per_index) for w in instruction.waits),
            *((n.signal_base, n.per_index) for n in instruction.notifies),
        )
        for base, per_index in bases:
            last = self._most(base) + (tasks if per_index else 1)
            require(
                last <= self.plan.num_signals, "{} uses {} signals of {}", where, last, self.plan.num_signals
            )

    def _most_tasks(self, extent: Number, step: NumberLike) -> int:
        """The largest number of tasks of a loop, for any sizes of a run."""
        if step == 0:
            return 1
        alike = isinstance(step, Number) and (extent.source, extent.which) == (step.source, step.which)
        if not isinstance(step, Number) or not alike:
            return -(-self._most(extent) // max(self._least(step), 1))
        # both grow with one size, so their ratio is largest at its smallest or largest value
        values = (0, 1, self._value(extent))
        return max(
            -(-(extent.constant + extent.multiple * v) // max(step.constant + step.multiple * v, 1))
            for v in values
        )

    def _require_number(self, where: str, number: NumberLike, most: int) -> None:
        """Constants and products are small enough that their sums fit in 64 bits."""
        if isinstance(number, int):
            require(abs(number) <= most, "{} has {}, out of range", where, number)
            return
        require(0 <= number.source < len(self.most) and number.which >= 0, "{} depends on {}", where, number)
        fits = abs(number.constant) <= most and abs(number.multiple) * self._value(number) <= most
        require(fits, "{} has {}, out of range", where, number)

    def _value(self, number: Number) -> int:
        """The largest possible value of what a number depends on."""
        of = self.most[number.source]
        return of[number.which] if number.which < len(of) else 0

    def _most(self, number: NumberLike) -> int:
        if isinstance(number, int):
            return number
        return number.constant + abs(number.multiple) * self._value(number)

    def _least(self, number: NumberLike) -> int:
        return number if isinstance(number, int) else max(number.constant, 1)


def _asked_of_devices(of: DeviceClass) -> tuple[set[tuple[int, NumberLike]], set[NumberLike]]:
    """Peers, as device group and member, that a class's instructions refer to; and what they divide
    peers' rows by.
    """
    peers: set[tuple[int, NumberLike]] = set()
    positive: set[NumberLike] = set()
    for template in of.templates:
        for instruction in template.instructions:
            for o in instruction.operands:
                if o.group != -1:
                    peers.add((o.group, o.member))
                    positive |= {o.div, o.parts} if o.mode == Mode.ROWPART else set()
            peers.update((w.group, w.member) for w in instruction.waits if w.group != -1)
            peers.update((n.group, n.member) for n in instruction.notifies)
    return peers, positive


def _range(number: NumberLike, ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The smallest and largest value of a number over the devices of a class."""
    if isinstance(number, int) or number.source == Source.NOTHING:
        value = number if isinstance(number, int) else number.constant
        return value, value
    fits = number.source == Source.DEVICE and number.which < len(ranges)
    require(fits, "{} is no number of the device", number)
    low, high = sorted(number.constant + number.multiple * value for value in ranges[number.which])
    return low, high


def _most_values(program: TileProgram, bounds: Sequence[int]) -> list[list[int]]:
    """Per source of numbers and index, the largest value on any device and in any call."""
    calls = [call for of in program.classes for calls in of.calls.values() for call in calls]
    most = [
        [0],
        list(bounds),
        [max(map(abs, values)) for values in zip_longest(*(d.numbers for d in program.devices), fillvalue=0)],
        [max(map(abs, values)) for values in zip_longest(*(c.numbers for c in calls), fillvalue=0)],
        [len(calls)],
    ]
    top = max((max(values, default=0) for values in most), default=0)
    require(top <= _MOST, "its devices and calls have numbers up to {}", top)
    return most
