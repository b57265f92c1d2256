"""Checks the values that flow through a tile program: each is complete when it is read.

A template's instructions are read in order. An exchange between devices counts as one step, as its
record says (`Collective`): it reads its source and writes its target. A value of which devices have
only parts may be read by nothing but the exchange that completes it.

This finds reductions that are missing, duplicated or exchanged, readers that come too early or read
a part as the whole, and values that nothing has written. It does not show that an exchange's
instructions do what the record says: one function makes them (`plan.collectives`), and the tests
compare its results with one device to the bit. Nor does it show that kernels compute what they
declare, when tasks run, which of several tensors of one shape a call means (`validate_bindings`), or
what a broadcast copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from tilewise.core.errors import InternalError
from tilewise.ir.layout import EVERY_STAGE, GraphLayout
from tilewise.ir.program import (
    COPIES,
    Access,
    Collective,
    DeviceClass,
    Instruction,
    LoweredTemplate,
    Number,
    Operand,
    TensorEntry,
    TileProgram,
    memory_kind,
)

__all__ = ["Values", "validate_values", "values_of"]

_NO_ROWS = Number(0)
_IN, _OUT = int(Access.IN), int(Access.OUT)  # as plain integers, which are quicker to combine


class Values(NamedTuple):
    """What a template reads from outside and what it writes.

    Attributes:
        needs: slots whose values it reads from outside.
        makes: slots that it writes.
        stacks: slots that take the parts of a microbatch: its number, and whether it is the last.
    """

    needs: frozenset[int]
    makes: frozenset[int]
    stacks: Mapping[int, tuple[int, bool]]


def values_of(template: LoweredTemplate, layout: GraphLayout | None) -> Values:
    """What a template reads and writes, after checking the order of its instructions.

    Raises:
        InternalError: a value is read before it is complete, or never completed.
    """
    return _Flow(template, layout).run()


def validate_values(
    program: TileProgram,
    layouts: Sequence[GraphLayout],
    written: frozenset[int],
    predecessors: Mapping[str, Sequence[str]],
    values: Mapping[int, Sequence[Values]] | None = None,
) -> None:
    """Every pending reduction is completed once, and every value is written before it is read.

    Args:
        layouts: per template, the layout of the graph that it lowers; templates that lower none
            come last.
        written: entries that have a value from outside before any list runs.
        predecessors: the lists that run before each list.
        values: `values_of` by number of the template, per class, as far as they are cached.

    Raises:
        InternalError: names the op or instruction, and what it reads.
    """
    if not layouts:
        _invalid("a program must lower a graph", "no layout of one")
    _require_all_pending(program, layouts)
    cached = {} if values is None else values
    has_stages = any(layout.stages is not None for layout in layouts)
    for class_id, of in enumerate(program.classes):
        flows = [
            cached[number][class_id]
            if number in cached
            else values_of(template, layouts[number] if number < len(layouts) else None)
            for number, template in enumerate(of.templates)
        ]
        same = _firsts(of.entries)
        # a tensor of other stages has no rows here, so there is nothing to write
        absent = {i for i, e in enumerate(of.entries) if e.extent == _NO_ROWS} if has_stages else set()
        for name in of.calls:
            _follow_calls(of, flows, same, name, written | absent, predecessors.get(name, ()))


def _require_all_pending(program: TileProgram, layouts: Sequence[GraphLayout]) -> None:
    """Each pending reduction of a graph is completed by a template, in every class whose stage runs
    the op.
    """
    own: dict[int, list[int]] = {}  # templates, by the layout that they lower
    for number, layout in enumerate(layouts):
        own.setdefault(id(layout), []).append(number)
    first = {device.class_id: d for d, device in reversed([*enumerate(program.devices)])}
    for class_id, of in enumerate(program.classes):
        for numbers in own.values():
            lowered = [of.templates[number] for number in numbers if number < len(of.templates)]
            layout = layouts[numbers[0]]
            if layout.stages is None and not any(template.instructions for template in lowered):
                continue  # a layer of another stage
            done = {(c.op, c.partial, c.number) for template in lowered for c in template.collectives}
            for (op, partial), pending_reductions in layout.pending_reductions.items():
                if not _runs(layout, first[class_id], op):
                    continue
                for i, pending in enumerate(pending_reductions):
                    if pending.group and (op, partial, i) not in done:
                        _invalid("a shared value must be completed", f"none of {partial!r} of op {op}")


def _runs(layout: GraphLayout, device: int, op: int) -> bool:
    """Whether a device's stage runs an op."""
    if layout.stages is None:
        return True
    stage = layout.stages.ops[op]
    return stage == EVERY_STAGE or stage % layout.num_stages == layout.stage_of(device)


class _Flow:
    """Follows the values through one template, step by step."""

    def __init__(self, template: LoweredTemplate, layout: GraphLayout | None) -> None:
        self.template, self.layout = template, layout
        self.needs: set[int] = set()
        self.makes: set[int] = set()
        self.stacks: dict[int, tuple[int, bool]] = {}
        first: dict[tuple[str, int, int], int] = {}
        # per slot, the first one of its memory
        self.same = [
            first.setdefault((memory_kind(s.kind), s.id, s.level), i) for i, s in enumerate(template.slots)
        ]
        # slots with a part that no exchange has combined yet
        self.parts = {self.same[c.source]: c for c in template.collectives if c.kind not in COPIES}
        self.used: set[int] = set()  # slots with a part that was combined into another slot

    def run(self) -> Values:
        """Check all steps."""
        template = self.template
        num_parts = sum(c.kind not in COPIES for c in template.collectives)
        if len(self.parts) < num_parts:
            _invalid("a part must belong to one value", f"two for a slot of template {template.name!r}")
        begins = {c.first: c for c in template.collectives if c.last > c.first}
        position = 0
        while position < len(template.instructions):
            record = begins.get(position)
            if record is not None:
                self._exchange(record)
                position = record.last
                continue
            if template.instructions[position].kernel:
                self._compute(template.instructions[position])
            position += 1
        for record in self.parts.values():
            _invalid(
                "a shared value must be completed once",
                f"{record.partial!r} of op {record.op} left as a part in template {template.name!r}",
            )
        return Values(frozenset(self.needs), frozenset(self.makes), self.stacks)

    def _exchange(self, record: Collective) -> None:
        if record.uses:
            for slot, access in record.uses:
                if access & _IN:
                    self._read(self.template.instructions[record.first].label, slot)
            for slot, access in record.uses:
                if access & _OUT:
                    self._write(self.same[slot])
            return
        source, label = self.same[record.source], self.template.instructions[record.first].label
        if record.kind in COPIES:
            if record.source >= 0:
                self._read(label, source)
        else:
            if self.parts.pop(source, None) is None or source not in self.makes:
                self._wrong(
                    label, f"it combines {record.partial!r} of op {record.op}, of which there is no part"
                )
            self.used.add(source)
        if record.residual >= 0 and record.stack < 0:
            self._read(label, record.residual)
        if record.microbatch >= 0:
            assert self.layout is not None
            pending = self.layout.pending_reductions[record.op, record.partial][record.number]
            is_last = (
                record.microbatch == len(pending.leaf_ranges[0]) // self.layout.mesh.size(*record.axes) - 1
            )
            self.stacks[self.same[record.stack]] = record.microbatch, is_last
            if not is_last:
                return
        if record.target >= 0:
            self._write(self.same[record.target])

    def _compute(self, instruction: Instruction) -> None:
        used = [(o, _role(o)) for o in instruction.operands if not o.null]
        writes = {self.same[o.slot] for o, role in used if role & _OUT}
        for o, role in used:
            slot = self.same[o.slot]
            # what an instruction also writes may be a part, or have no value yet
            is_fresh = slot in writes and (slot in self.parts or slot not in self.makes)
            if role & _IN and not is_fresh:
                self._read(instruction.label, slot)
            if o.group >= 0 and self.layout is not None:
                self._wrong(instruction.label, "it reads peers, but belongs to no exchange")
        for slot in writes:
            self._write(slot)

    def _read(self, label: str, slot: int) -> None:
        slot = self.same[slot]
        if slot in self.parts or slot in self.used:
            self._wrong(label, f"it reads {self.template.slots[slot]}, of which this device has a part")
        if slot not in self.makes:
            self.needs.add(slot)

    def _write(self, slot: int) -> None:
        self.used.discard(slot)
        self.makes.add(slot)

    def _wrong(self, label: str, what: str) -> NoReturn:
        _invalid("values must be complete when they are read", f"{label!r}: {what}")


def _follow_calls(
    of: DeviceClass,
    flows: Sequence[Values],
    same: Sequence[int],
    name: str,
    written: frozenset[int],
    predecessors: Sequence[str],
) -> None:
    """Check that earlier calls wrote everything that a call reads. `same` is the first entry of each
    entry's memory.
    """
    has_value = bytearray(len(same))  # 1 where there is a value; a set of a million numbers misses the cache
    for e in written:
        has_value[same[e]] = 1
    for earlier in predecessors:
        for call in of.calls.get(earlier, ()):
            for s in flows[call.template].makes:
                has_value[same[call.binding[s]]] = 1
    taken: dict[int, tuple[int, bool]] = {}  # per stack: number of microbatches so far, and whether all
    for call in of.calls[name]:
        flow = flows[call.template]
        for slot, (microbatch, is_last) in flow.stacks.items():
            entry = same[call.binding[slot]]
            before, _ = taken.get(entry, (0, False))
            if before != microbatch:
                _invalid(
                    "a stack must take the microbatches in order",
                    f"number {microbatch} after {before} for {of.entries[entry].key} in {name!r}",
                )
            taken[entry] = microbatch + 1, is_last
        for slot in flow.needs:
            if not has_value[same[call.binding[slot]]]:
                template = of.templates[call.template]
                _invalid(
                    "a value must be written before it is read",
                    f"{of.entries[call.binding[slot]].key} read by template {template.name!r} in {name!r}",
                )
        for s in flow.makes:
            has_value[same[call.binding[s]]] = 1
    for entry, (microbatch, is_last) in taken.items():
        if not is_last:
            _invalid(
                "a stack must take all microbatches",
                f"{microbatch} for {of.entries[entry].key} in {name!r}",
            )


def _role(operand: Operand) -> int:
    return operand.role or operand.access or _IN


def _firsts(entries: Sequence[TensorEntry]) -> list[int]:
    """Per entry, the first entry of its memory. Most keys are a tensor's number; a dict of these
    numbers is faster than one of whole keys.
    """
    numbers: dict[object, int] = {}
    keys: dict[object, int] = {}
    firsts = []
    for position, entry in enumerate(entries):
        key = entry.key
        if len(key) == 3 and key[2] == 0 and (key[0] == "tensor" or key[0] == "flat"):
            firsts.append(numbers.setdefault(key[1], position))
        else:
            firsts.append(keys.setdefault(_memory(key), position))
    return firsts


def _memory(key: tuple[object, ...]) -> tuple[object, ...]:
    """The key of the entry with which the memory was created."""
    kind = str(key[0])
    if kind == "tensor":
        return key
    plain = "tensor" if kind == "flat" else kind.removesuffix("_flat")
    return key if plain == kind else (plain, *key[1:])


def _invalid(rule: str, got: str) -> NoReturn:
    raise InternalError(f"[ir.validate] {rule}; got {got}; please report the plan")
