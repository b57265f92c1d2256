"""Checks the values in a tile program: a value of which devices have parts is completed once, in
the order of its tree, and read only afterwards.

A template is a block of instructions, and its slots are formal parameters. A template declares
which slots have a shared value before and after a reduction (`Reduction`). Layouts say which device
has which part of the value (`PendingReduction`). The check reads the instructions in order. Each
slot is in one of three states:

    partial   written by its producers; read only by one reduction, which reads the parts of all members in tree order
    share     the result of the reduction: this member's rows; one copy per other member adds the rest
    complete  any instruction may read it

If parts are combined in each microbatch, a stack keeps the partial sums of the tree for this
member's share. The last microbatch replaces the stack by the share itself. Every stack must receive
all microbatches in order, each once. A sum that is delivered in shards is complete after its
reduction. If a sum or a slice divides columns among a device group, the members' columns must
follow one another in the group's order, with no column missing.

The check finds reductions that are missing, duplicated, exchanged, or over the wrong device group
or rows. It finds instructions that read a value too early or read a part as the whole, and copies
of columns that do not name every member once. A slot that is read must have been written before or
come from outside.

The check does not show that kernels compute what they declare, when tasks run, or what a broadcast
copies. Whether a call is bound to the right tensors is checked by `validate_bindings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from tilewise.ir.layout import BATCH_SPLITS, GraphLayout, PendingReduction
from tilewise.ir.program import (
    Access,
    DeviceClass,
    Instruction,
    LoweredTemplate,
    Mode,
    Operand,
    Reduction,
    Source,
    TensorEntry,
    TileProgram,
    memory_kind,
)
from tilewise.ir.validate.exchanges import (
    Collected,
    Columns,
    Exchange,
    StorageShard,
    confirm_columns,
    confirm_exchanges,
    confirm_shards,
    invalid,
)

__all__ = ["Values", "validate_reductions", "values_of"]

_KERNELS = {"sum": "tree_add", "max": "tree_max", "or": "tree_or"}
_REDUCING = tuple(_KERNELS.values())
_RESUME = "tree_resume"
_COPY = "copy_pairs"
_SHARING = (*_REDUCING, _RESUME, _COPY)
_IN, _OUT = int(Access.IN), int(Access.OUT)  # as plain integers, which are quicker to combine
_PARTIAL, _SHARE, _SPENT, _COMPLETE = (
    "one device's part",
    "one member's share",
    "a part, already used",
    "complete",
)


class Values(NamedTuple):
    """The slots whose values a template reads from outside, and the slots that the template writes."""

    needs: frozenset[int]
    makes: frozenset[int]


def values_of(template: LoweredTemplate, layout: GraphLayout) -> Values | None:
    """Check a template's instructions, and return the slots that it reads from outside and writes.
    None if other devices or microbatches contribute to a value, because checking that needs the
    whole program.

    Raises:
        InternalError: as for `validate_reductions`.
    """
    flow = _Flow(template, layout)
    flow.run()
    if flow.exchanges or flow.stacks or flow.columns or flow.shards or flow.collected:
        return None
    return Values(frozenset(flow.needs), frozenset(flow.makes))


def validate_reductions(
    program: TileProgram,
    layouts: Sequence[GraphLayout],
    written: frozenset[int],
    predecessors: Mapping[str, Sequence[str]],
    values: Mapping[int, Values] | None = None,
) -> None:
    """Check that every pending reduction is completed once and correctly, and that every value is
    written before it is read.

    Args:
        layouts: per template, the layout of the graph that it was lowered from. Templates without
            such a graph come last and have no layout here.
        written: entries that have a value from outside before any list runs.
        predecessors: the lists that run before each list.
        values: results of `values_of` that are known already, by number of the template. They must
            hold for all classes of devices.

    Raises:
        InternalError: names the op or instruction, and what it reads.
    """
    if not layouts:
        invalid("a program must lower a graph", "no layout of one")
    _require_all_pending(program, layouts)
    cached = {} if values is None else values
    every: list[list[_Flow]] = []
    for class_id, of in enumerate(program.classes):
        exchanges: dict[Exchange, str] = {}
        flows = []
        for number, template in enumerate(of.templates):
            flow = _Flow(template, layouts[number] if number < len(layouts) else None)
            if number in cached:
                flow.needs, flow.makes = {*cached[number].needs}, {*cached[number].makes}
            else:
                flow.run()
            flows.append(flow)
            exchanges.update(flow.exchanges)
        confirm_exchanges(program, class_id, exchanges, layouts[0].mesh)
        same = _firsts(of.entries)
        for name in of.calls:
            _follow_calls(of, flows, same, name, written, predecessors.get(name, ()))
        every.append(flows)
    confirm_columns(program, every, layouts[0].mesh)
    confirm_shards(program, every, layouts[0].mesh)


def _require_all_pending(program: TileProgram, layouts: Sequence[GraphLayout]) -> None:
    """Each pending reduction of a graph is completed by a template."""
    own: dict[int, list[int]] = {}  # templates, by the layout that they lower
    for number, layout in enumerate(layouts):
        own.setdefault(id(layout), []).append(number)
    for of in program.classes:
        for numbers in own.values():
            done = {
                (c.op, c.partial, c.number)
                for number in numbers
                if number < len(of.templates)
                for c in of.templates[number].reductions
            }
            for (op, partial), pending_reductions in layouts[numbers[0]].pending_reductions.items():
                for i, pending in enumerate(pending_reductions):
                    if pending.group and (op, partial, i) not in done:
                        invalid("a shared value must be completed", f"none of {partial!r} of op {op}")


class _Flow:
    """Follows the values through one template of one class, instruction by instruction.

    Attributes:
        needs, makes: slots whose value is read from outside, and slots that are written.
        exchanges: exchanges to confirm, with the label of an instruction.
        stacks: slots that take a microbatch: its number, and the number of all.
        columns: what is divided into columns for the value of a slot.
        shards: the storage shards whose rows of a slot are added for the value of another.
        collected: slots that are assembled from the storage shards of a device group, or from its
            parts of a batch.
    """

    def __init__(self, template: LoweredTemplate, layout: GraphLayout | None) -> None:
        self.template, self.layout = template, layout
        self.needs: set[int] = set()
        self.makes: set[int] = set()
        self.exchanges: dict[Exchange, str] = {}
        self.stacks: dict[int, tuple[int, int]] = {}
        self.columns: dict[int, Columns] = {}
        self.shards: dict[int, StorageShard] = {}
        self.collected: dict[int, Collected] = {}
        self._same: list[int] = []  # per slot, the first one of its memory
        self._state: dict[int, str] = {}
        self._open: dict[int, Reduction] = {}  # parts that are not combined yet
        self._halves: dict[int, Reduction] = {}  # combined, not copied yet

    def run(self) -> None:
        """Check all instructions.

        Raises:
            InternalError: a value is read before it is complete, or never completed.
        """
        first: dict[tuple[str, int, int], int] = {}
        self._same = [
            first.setdefault((memory_kind(s.kind), s.id, s.level), i)
            for i, s in enumerate(self.template.slots)
        ]
        self._open = {self._same[c.source]: c for c in self.template.reductions}
        if len(self._open) < len(self.template.reductions):
            invalid("a part must belong to one value", f"two for a slot of template {self.template.name!r}")
        for instruction in self.template.instructions:
            if instruction.kernel and not (
                instruction.kernel.startswith(_SHARING)
                and (self._reduces(instruction) or self._gathers(instruction) or self._collects(instruction))
            ):
                self._other(instruction)
        for slot, shard in self.collected.items():
            if self._state[slot] != _COMPLETE:
                invalid(
                    "storage shards or rows of a batch must be gathered from all members",
                    f"{len(shard.rows)} for slot {slot} in template {self.template.name!r}",
                )
        for slot, reduction in (*self._open.items(), *self._halves.items()):
            invalid(
                "a shared value must be completed once",
                f"{reduction.partial!r} of op {reduction.op} left as {self._state.get(slot, 'nothing')} in template "
                f"{self.template.name!r}",
            )

    def _reduces(self, instruction: Instruction) -> bool:
        if instruction.kernel.startswith(_RESUME):
            return self._resumes(instruction)
        if not instruction.kernel.startswith(_REDUCING):
            return False
        out, residual, *parts = instruction.operands
        reduction = self._open.get(self._same[parts[0].slot]) if parts else None
        if reduction is None or self.layout is None:
            self._wrong(instruction, "it combines parts, but no reduction is pending")
        pending = self.layout.pending_reductions[reduction.op, reduction.partial][reduction.number]
        source, target = self._same[reduction.source], self._same[reduction.target]
        if reduction.microbatch >= 0 or pending.is_completed_per_microbatch:
            self._wrong(instruction, "its parts must go onto a stack in every microbatch")
        residual_slot = -1 if residual.null else residual.slot
        if pending.arrives_in_shards and pending.tree == BATCH_SPLITS:
            return self._reduces_to_shard(instruction, reduction, pending)
        own = [residual] if residual_slot >= 0 else []
        mode = Mode.ROWCOLS if pending.arrives_in_shards else Mode.ROWPART
        fits = (
            instruction.kernel.startswith(_KERNELS[pending.combine])
            and (self._same[out.slot], residual_slot) == (target, reduction.residual)
            and all(self._same[p.slot] == source and p.mode == mode for p in parts)
            and all(_rows(p) == _rows(parts[0]) for p in parts)
            and (mode == Mode.ROWCOLS or _rows(out) == _rows(parts[0]))
            and (mode == Mode.ROWPART or out.mode in (Mode.ROW, Mode.WHOLE))
            and all(o.group < 0 and (_rows(o) == _rows(out) or self._is_bias(o)) for o in own)
        )
        if not fits or self._state.get(source) != _PARTIAL:
            self._wrong(instruction, f"it does not combine {reduction.partial!r} of op {reduction.op}")
        if residual_slot >= 0:
            self._read(instruction, residual_slot)
        self._add(instruction, pending, out, parts)
        del self._open[source]
        self._state[source] = _SPENT
        if pending.arrives_in_shards:
            self.columns[target] = Columns(pending.group, source, parts[0].part, parts[0].parts)
            self._write(target)
            return True
        self._state[target] = _SHARE
        self._halves[target] = reduction
        return True

    def _reduces_to_shard(
        self, instruction: Instruction, reduction: Reduction, pending: PendingReduction
    ) -> bool:
        """Whether an instruction combines the rows of this device's storage shard, or its share of
        them if others have the same shard.
        """
        assert self.layout is not None
        out, residual, *parts = instruction.operands
        source, target = self._same[reduction.source], self._same[reduction.target]
        residual_slot = -1 if residual.null else residual.slot
        fits = (
            instruction.kernel.startswith(_KERNELS[pending.combine])
            and (self._same[out.slot], residual_slot) == (target, reduction.residual)
            and (residual.null or (residual.group < 0 and _rows(residual) == _rows(out)))
            and out.mode == Mode.ROWPART
            and out.offset == 0
            and all(self._same[p.slot] == source and _rows(p) == _rows(parts[0]) for p in parts)
            and _rows(parts[0]._replace(offset=0)) == _rows(out)
        )
        if not fits or self._state.get(source) != _PARTIAL:
            self._wrong(instruction, f"it does not combine {reduction.partial!r} of op {reduction.op}")
        if residual_slot >= 0:
            self._read(instruction, residual_slot)
        self._take_shard(instruction, pending, target, source, parts)
        del self._open[source]
        self._state[source] = _SPENT
        self._share(target, reduction)
        return True

    def _collects(self, instruction: Instruction) -> bool:
        """One member's storage shard, or its rows of a batch, is copied after those of the members
        before it.
        """
        pairs = _pairs(instruction)
        if len(pairs) != 1 or self.layout is None:
            return False
        ((dst, src),) = pairs
        if src.group < 0 or dst.mode != Mode.ROWPART:
            return False
        slot = self._same[dst.slot]
        before, after = (self.layout.compute[self.template.slots[o.slot].id][0] for o in (src, dst))
        collected = self.collected.get(slot)
        if collected is None:
            in_panels = self.template.slots[src.slot].kind == "flat"  # otherwise it is a batch, in rows
            axes = before[len(after) :]
            collected = self.collected[slot] = Collected(axes, self._same[src.slot], src.group, [], in_panels)
        end = sum(collected.rows)
        fits = (
            before[: len(after)] == after
            and (collected.source, collected.group, len(collected.rows))
            == (self._same[src.slot], src.group, src.member)
            and (src.mode, dst.offset, dst.parts, dst.part) == (Mode.ROW, end, 1, 0)
            and instruction.extent.source == Source.NOTHING
        )
        if not fits:
            self._wrong(instruction, "members' rows must be copied in the device group's order")
        self._read(instruction, collected.source)
        collected.rows.append(instruction.extent.constant)
        self._state[slot] = _SHARE
        if len(collected.rows) == self.layout.mesh.size(*collected.axes):
            self._state[slot] = _COMPLETE
            self._write(slot)
        return True

    def _is_bias(self, operand: Operand) -> bool:
        """Whether an operand is a whole vector that is added to every row."""
        assert self.layout is not None
        slot = self.template.slots[operand.slot]
        return operand.mode == Mode.WHOLE and slot.kind == "tensor" and len(self.layout.compute[slot.id]) == 1

    def _resumes(self, instruction: Instruction) -> bool:
        """The parts of one microbatch are added to the stack of this member's share."""
        left, carries, *parts = instruction.operands
        reduction = self._open.get(self._same[parts[0].slot]) if parts else None
        if reduction is None or self.layout is None or reduction.microbatch < 0:
            self._wrong(instruction, "it combines parts, but no reduction is pending")
        pending = self.layout.pending_reductions[reduction.op, reduction.partial][reduction.number]
        members, num_parts = len(parts), len(pending.leaf_ranges[0])
        source, target = self._same[reduction.source], self._same[reduction.target]
        stack, last = self._same[reduction.stack], reduction.microbatch == num_parts // members - 1
        in_shards = pending.arrives_in_shards
        read = _rows(parts[0])
        rows = read._replace(offset=0) if in_shards else read
        begin = reduction.microbatch * members
        on_stack = carries if last else left
        fits = (
            pending.is_completed_per_microbatch
            and pending.combine == "sum"
            and rows.mode == Mode.ROWPART
            and all(self._same[p.slot] == source and _rows(p) == read for p in parts)
            and instruction.ints == (begin, members, int(last))
            and carries.null == (begin == 0)
            and all(self._same[o.slot] == stack and o.group < 0 for o in (on_stack, carries) if not o.null)
            and (begin == 0 or _rows(carries) == _rows(on_stack))
            and (self._same[left.slot] == target and _rows(left) == rows if last else True)
            and ((on_stack.mode == Mode.ROW and on_stack.div == rows.parts) or _rows(on_stack) == rows)
        )
        if not fits or self._state.get(source) != _PARTIAL:
            self._wrong(instruction, f"it does not resume {reduction.partial!r} of op {reduction.op}")
        self.stacks[stack] = reduction.microbatch, num_parts // members
        if in_shards:
            self._take_shard(instruction, pending, target, source, parts)
        else:
            self._add(instruction, pending, parts[0], parts)
        del self._open[source]
        self._state[source] = _SPENT
        if last:
            self._share(target, reduction)
        return True

    def _take_shard(
        self,
        instruction: Instruction,
        pending: PendingReduction,
        target: int,
        source: int,
        parts: Sequence[Operand],
    ) -> None:
        """The parts of all members, in order, of the rows of this device's storage shard."""
        peers = tuple((o.group, o.member) for o in parts)
        leaf_ranges, count = pending.leaf_ranges, pending.count
        if pending.is_completed_per_microbatch:
            leaf_ranges, count = (tuple((i, i + 1) for i in range(len(parts))),), len(parts)
        exchange = Exchange(pending.group, leaf_ranges, count, -1, peers, (), len(parts))
        self.exchanges.setdefault(exchange, instruction.label)
        shards = {axis for layout in pending.arrives for axes in layout for axis in axes}
        cut = tuple(axis for axis in pending.group if axis in shards)
        alike = tuple(axis for axis in pending.group if axis not in shards)
        rows = parts[0]
        self.shards[target] = StorageShard(
            cut, alike, source, rows.offset, instruction.extent, rows.part, rows.parts
        )

    def _share(self, target: int, reduction: Reduction) -> None:
        """A device has combined its own rows. Others have the rest, unless the rows are only its
        storage shard.
        """
        shard = self.shards.get(target)
        if shard is not None and not shard.alike:
            self._write(target)
        else:
            self._state[target] = _SHARE
            self._halves[target] = reduction

    def _gathers(self, instruction: Instruction) -> bool:
        pairs = _pairs(instruction)
        reduction = self._halves.get(self._same[pairs[0][0].slot]) if pairs else None
        if reduction is None or self.layout is None:
            return False
        pending = self.layout.pending_reductions[reduction.op, reduction.partial][reduction.number]
        target = self._same[reduction.target]
        for dst, src in pairs:
            fits = self._same[dst.slot] == self._same[src.slot] == target and dst.mode == Mode.ROWPART
            if not fits or _rows(dst) != _rows(src) or dst.group >= 0:
                self._wrong(instruction, "a member's share must be copied to its own rows")
        if target in self.shards:
            peers = tuple((src.group, src.member) for _, src in pairs)
            shares = tuple(src.part for _, src in pairs)
            count = pairs[0][1].parts
            if not isinstance(count, int):
                self._wrong(instruction, "the number of members must be a constant")
            exchange = Exchange(self.shards[target].alike, (), 0, -1, peers, shares, count)
            self.exchanges.setdefault(exchange, instruction.label)
        else:
            self._add(instruction, pending, None, [src for _, src in pairs])
        del self._halves[target]
        self._write(target)
        return True

    def _add(
        self,
        instruction: Instruction,
        pending: PendingReduction,
        out: Operand | None,
        read: Sequence[Operand],
    ) -> None:
        # the parts of one microbatch: a batch split per member, in order
        if pending.is_completed_per_microbatch:
            members = len(read) + (out is None)  # a copy reads all but its own
            one_each = tuple((i, i + 1) for i in range(members))
            pending = replace(pending, leaf_ranges=(one_each,), count=members)
        is_cut = read[0].mode == Mode.ROWCOLS
        shares = len(read) if is_cut else read[0].parts
        mine = -1 if out is None or is_cut else out.part
        peers = tuple((o.group, o.member) for o in read)
        parts = tuple(o.part for o in read) if out is None else ()
        if not isinstance(shares, int):
            self._wrong(instruction, "the number of members must be a constant")
        exchange = Exchange(pending.group, pending.leaf_ranges, pending.count, mine, peers, parts, shares)
        self.exchanges.setdefault(exchange, instruction.label)

    def _other(self, instruction: Instruction) -> None:
        same, used = self._same, [(o, _role(o)) for o in instruction.operands if not o.null]
        writes = {same[o.slot] for o, role in used if role & _OUT}
        for o, role in used:
            if role & _IN:
                slot = same[o.slot]
                if slot not in writes or self._state.get(slot, _PARTIAL) != _PARTIAL:
                    self._read(instruction, slot)
        if self.layout is not None and any(o.group >= 0 for o in instruction.operands):
            self._columns(instruction, self.layout)
        elif self.layout is not None:
            self._slices(instruction, self.layout)
        for slot in writes:
            if self._state.get(slot) == _SHARE:
                self._wrong(instruction, f"it writes {self.template.slots[slot]} between its two halves")
            self._write(slot)

    def _columns(self, instruction: Instruction, layout: GraphLayout) -> None:
        """Columns of all members, one after another."""
        pairs, end = _pairs(instruction), 0
        for dst, src in pairs:
            if (
                dst.mode != Mode.ROWCOLS
                or dst.part != end
                or not isinstance(dst.parts, int)
                or src.mode != Mode.ROW
            ):
                self._wrong(instruction, "members' columns must be adjacent")
            end += dst.parts
        slots = {(d.slot, s.slot) for d, s in pairs}
        if len(slots) != 1:
            self._wrong(instruction, "it reads peers, but they share no value")
        after, before = (layout.compute[self.template.slots[s].id][-1] for s in slots.pop())
        peers = tuple((s.group, s.member) for _, s in pairs)
        exchange = Exchange(before[len(after) :], (), 0, 0, peers, (), len(pairs))
        self.exchanges.setdefault(exchange, instruction.label)

    def _slices(self, instruction: Instruction, layout: GraphLayout) -> None:
        """This device's columns of a value with more columns."""
        for dst, src in _pairs(instruction):
            if src.mode == Mode.ROWCOLS and {"tensor"} == {
                self.template.slots[o.slot].kind for o in (dst, src)
            }:
                before, after = (layout.compute[self.template.slots[o.slot].id][-1] for o in (src, dst))
                cut = Columns(after[len(before) :], self._same[src.slot], src.part, src.parts)
                self.columns[self._same[dst.slot]] = cut

    def _read(self, instruction: Instruction, slot: int) -> None:
        slot = self._same[slot]
        if self._state.get(slot, _COMPLETE) != _COMPLETE:
            self._wrong(instruction, f"it reads {self.template.slots[slot]}, {self._state[slot]}")
        if slot not in self.makes:
            self.needs.add(slot)

    def _write(self, slot: int) -> None:
        self._state[slot] = _PARTIAL if slot in self._open else _COMPLETE
        self.makes.add(slot)

    def _wrong(self, instruction: Instruction, what: str) -> NoReturn:
        invalid("values must be complete when they are read", f"{instruction.label!r}: {what}")


def _follow_calls(
    of: DeviceClass,
    flows: Sequence[_Flow],
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
    taken: dict[int, tuple[int, int]] = {}  # per stack: number of microbatches so far, and of all
    for call in of.calls[name]:
        flow = flows[call.template]
        for slot, (microbatch, count) in flow.stacks.items():
            entry = same[call.binding[slot]]
            before = taken.get(entry, (0, count))
            if before != (microbatch, count):
                invalid(
                    "a stack must take the microbatches in order",
                    f"number {microbatch} of {count} after {before[0]} for {of.entries[entry].key} in {name!r}",
                )
            taken[entry] = microbatch + 1, count
        for slot in flow.needs:
            if not has_value[same[call.binding[slot]]]:
                invalid(
                    "a value must be written before it is read",
                    f"{of.entries[call.binding[slot]].key} read by template {flow.template.name!r} in {name!r}",
                )
        for s in flow.makes:
            has_value[same[call.binding[s]]] = 1
    for entry, (microbatch, count) in taken.items():
        if microbatch < count:
            what = f"{microbatch} of {count} for {of.entries[entry].key} in {name!r}"
            invalid("a stack must take all microbatches", what)


def _pairs(instruction: Instruction) -> list[tuple[Operand, Operand]]:
    """Destinations and sources of a copy."""
    if not instruction.kernel.startswith(_COPY):
        return []
    return list(zip(instruction.operands[::2], instruction.operands[1::2]))


def _rows(operand: Operand) -> Operand:
    return operand._replace(access=Access.NONE, role=Access.NONE, slot=0, group=-1, member=0)


def _role(operand: Operand) -> int:
    return operand.role or operand.access or _IN


def _kind(kind: str) -> str:
    """The kind of a slot or entry, without its view."""
    return "tensor" if kind == "flat" else kind.removesuffix("_flat")


def _firsts(entries: Sequence[TensorEntry]) -> list[int]:
    """Per entry, the first entry of its memory. Most keys are a tensor's
    number; a dict of these numbers is faster than one of whole keys.
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
    plain = _kind(kind)
    return key if plain == kind else (plain, *key[1:])
