"""Binds the slots of templates to entries: the memory that each use of a template works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tilewise.core.dtypes import dtype
from tilewise.ir.graph import OpNode, TensorNode
from tilewise.ir.lowering import Ref
from tilewise.ir.program import Call, Instruction, LoweredTemplate, Mode, Number, Operand, Slot, upper
from tilewise.plan.bind.entries import Cut, EntryTable
from tilewise.plan.bind.reuse import LiveInterval
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.emission import make_instruction
from tilewise.plan.lower import Use, Variant, flat_view
from tilewise.plan.memory import Buffer
from tilewise.plan.place import carry_or_ring_key, category_of, own_key
from tilewise.plan.schedule import RootTensors, SeenTensors
from tilewise.plan.shapes import round_up

__all__ = ["Binder"]

Key = tuple[object, ...]


# The kinds of a slot: a tensor of the caller as it is, or as plain rows (by its number among the call's operands and
# results; by its id in a run of root ops); a carry, stack or ring, bound per use; the variant's own; or a tensor of
# the use in the microbatch before, as plain rows.
_SEEN, _FLAT, _CARRY_OR_RING, _OWN, _BEFORE = range(5)
_NOTHING = LiveInterval((), -1, 0, 0, 0)


class _Binding(NamedTuple):
    """What all uses of a variant have in common: its own entries by position, and how the others
    are found, in order: position, kind, number.
    """

    own: dict[int, int]
    others: list[tuple[int, int, int]]
    blank: list[int]  # a binding without the entries of `others`


class Binder:
    """Fills a table of entries and binds templates to them.

    Args:
        tensors: those of the root graph.
        variants: all lowered templates.
        buffers: per stage, all buffers with their offsets.
    """

    def __init__(
        self, tensors: RootTensors, variants: Sequence[Variant], buffers: Sequence[Iterable[Buffer]]
    ) -> None:
        self.tensors, self.variants = tensors, variants
        shapes = tensors.shapes
        self._seen = SeenTensors(tensors.graph)
        self.stages = [shapes.on(device).stage for device in shapes.kinds]  # of each class
        self.table = EntryTable(self.stages, shapes.bounds)
        # per stage; all but those of root tensors
        self.buffers: list[dict[Key, Buffer]] = [{} for _ in buffers]
        self._nowhere: tuple[Buffer | None, ...] = (None,) * len(buffers)
        # of root tensors, per stage
        self._memory: list[tuple[Buffer | None, ...]] = [self._nowhere] * len(tensors.graph.tensors)
        for stage, of in enumerate(buffers):
            for b in of:
                if b.key[0] == "tensor":
                    before = self._memory[b.key[1]]  # type: ignore[call-overload]
                    self._memory[b.key[1]] = (*before[:stage], b, *before[stage + 1 :])  # type: ignore[call-overload]
                else:
                    self.buffers[stage][b.key] = b
        self._cuts: tuple[dict[int, Cut], dict[int, Cut]] = {}, {}  # by form; as they are, and as plain rows
        self._slot_cuts: dict[tuple[int, int], Cut] = {}  # by variant and slot
        self._bindings: dict[int, _Binding] = {}  # by variant
        # entries of root tensors, by microbatch and view
        self._root_entries: dict[tuple[int, bool], list[int]] = {}

    def outside(self) -> dict[int, tuple[int, ...]]:
        """Entries of all tensors that users read or write, one for each of their parts."""
        tensors, roots, keep = self.tensors, self.tensors.roots, self.tensors.keep
        entries, by_tensor = self._entries(0, False), dict[int, tuple[int, ...]]()
        for t in tensors.graph.tensors:
            number = t.id
            if t.kind == "result" and number not in keep:
                continue
            parts = tensors.num_parts(number)
            if parts == 1 and entries[number] < 0 and number not in roots:
                entry = entries[number] = self._add(number, 0, False)
                by_tensor[number] = (entry,)
            else:
                by_tensor[number] = tuple([self.tensor(number, m) for m in range(parts)])
        return by_tensor

    def tensor(self, tensor: int, microbatch: int = 0, *, flat: bool = False) -> int:
        """The entry of a root tensor, or of its part for one microbatch if it has parts."""
        entries = self._entries(microbatch, flat)
        number = entries[tensor]
        if number < 0:
            root = self.tensors.roots.get(tensor, tensor)
            part = self.tensors.part(root, microbatch)
            of_roots = self._entries(part, flat)
            if of_roots[root] < 0:
                of_roots[root] = self._add(root, part, flat)
            number = entries[tensor] = of_roots[root]
        return number

    def _entries(self, microbatch: int, flat: bool) -> list[int]:
        """Entries of root tensors in a microbatch; -1 for those not created yet."""
        entries = self._root_entries.get((microbatch, flat))
        if entries is None:
            entries = self._root_entries[microbatch, flat] = [-1] * len(self._memory)
        return entries

    def _add(self, root: int, part: int, flat: bool) -> int:
        form, cuts = self.tensors.form(root), self._cuts[flat]
        cut = cuts.get(form)
        if cut is None:
            cut = cuts[form] = self._cut(root, flat)
        shift = part * self.tensors.part_bytes(root) if part else 0
        return self.table.append(("flat" if flat else "tensor", root, part), self._memory[root], cut, shift)

    def _cut(self, tensor: int, flat: bool) -> Cut:
        """The view that each class has of a tensor."""
        node = self.tensors.graph.tensors[tensor]
        layout = self.tensors.layout.compute[tensor]
        is_vector = node.spec.storage == "vector"
        views, strides = [], []
        for device in self.tensors.shapes.kinds:
            shapes, in_file = self.tensors.shapes.on(device), tensor in self.tensors.files
            view = shapes.view(node.spec, layout, node.kind, 0, in_file=in_file)
            strides.append(1 if flat and is_vector else _stride(view, node.spec.storage))
            views.append(flat_view(view, 0, is_vector) if flat else view)
        return self.table.cut(views, strides)

    def use(self, use: Use) -> Call:
        """Bind one use of a variant: the entry of each of its slots."""
        call, microbatch = use.segment.call, use.microbatch
        common = self._bindings.get(use.variant)
        if common is None:
            common = self._bindings[use.variant] = self._common(self.variants[use.variant], call)
        seen = None if call is None else (*call.inputs, *call.outputs)
        entries = self._entries(microbatch, False), self._entries(microbatch, True)
        roots, binding = self.tensors.roots, common.blank.copy()
        for position, kind, place in common.others:
            if kind == _CARRY_OR_RING:
                variant = self.variants[use.variant]
                binding[position] = self._carry_or_ring(variant, position, variant.slots[position], use)
                continue
            tensor = place if seen is None else seen[place]
            assert tensor is not None
            if kind == _BEFORE:
                binding[position] = self.tensor(tensor, max(microbatch - 1, 0), flat=True)
                continue
            number = entries[kind][tensor]
            if number < 0 and not microbatch and tensor not in roots:  # the usual case
                number = entries[kind][tensor] = self._add(tensor, 0, kind == _FLAT)
            binding[position] = number if number >= 0 else self.tensor(tensor, microbatch, flat=kind == _FLAT)
        return Call(use.variant, tuple(binding), use.numbers)

    def _common(self, variant: Variant, call: OpNode | None) -> _Binding:
        """What all uses of a variant have in common."""
        outside = None if call is None else self._seen.of(call)
        common = _Binding({}, [], [0] * len(variant.slots))
        for position, slot in enumerate(variant.slots):
            kind, place = self._place(variant, position, slot, outside)
            if kind == _OWN:
                common.own[position] = common.blank[position] = place
            else:
                common.others.append((position, kind, place))
        return common

    def _place(
        self, variant: Variant, position: int, slot: Slot, outside: Mapping[int, int] | None
    ) -> tuple[int, int]:
        """How every use finds the entry of a slot. `outside` are the tensors that a layer's caller
        sees.
        """
        if slot.kind == "temp" or slot.kind == "temp_flat":
            key = slot.kind, variant.number, slot.id
            return _OWN, self._own(variant, position, key, "temp", "rows")
        if slot.kind not in ("tensor", "flat"):
            return _CARRY_OR_RING, 0
        if slot.level:
            return _BEFORE, slot.id
        flat = slot.kind == "flat"
        seen = slot.id if outside is None else outside.get(slot.id)
        if seen is not None:
            return _FLAT if flat else _SEEN, seen
        storage = variant.graph.spec(slot.id).storage
        key = "inner_flat" if flat else "inner", variant.number, slot.id
        return _OWN, self._own(variant, position, key, "inner", storage)

    def _carry_or_ring(self, variant: Variant, position: int, slot: Slot, use: Use) -> int:
        """The entry of a carry or stack of a sum, or of a place in a ring."""
        key = carry_or_ring_key(self._seen, variant, use, slot)
        storage = variant.graph.spec(slot.id).storage if slot.kind != "stack" else "rows"
        cut = self._cut_of_slot(variant, position, storage)
        return self.table.add((slot.kind, *key[1:]), self._buffers(key), cut)

    def _buffers(self, key: Key) -> list[Buffer | None]:
        """Per stage, the buffer with a key."""
        return [of.get(key) for of in self.buffers]

    def _own(self, variant: Variant, position: int, key: Key, kind: str, storage: str) -> int:
        """The entry of a temporary of a template."""
        if key in self.table.numbers:
            return self.table.numbers[key]
        buffers = self._buffers((kind, variant.number, key[2]))
        return self.table.add(key, buffers, self._cut_of_slot(variant, position, storage))

    def live_intervals(self, stage: int, use: Use, call: Call) -> list[LiveInterval]:
        """The temporaries of the template that a call of a stage uses, in the order in which they
        become live.
        """
        variant = self.variants[use.variant]
        own: dict[int, Buffer] = {}
        for position in self._bindings[use.variant].own:
            kind, number = own_key(variant.slots[position])
            own[position] = self.buffers[stage][kind, variant.number, number]
        sizes: list[dict[int, int]] = []  # per class, bytes that every use writes
        tables = [table for table, of in zip(self.table.tables, self.stages) if of == stage]
        writing = (written for written, of in zip(variant.written, self.stages) if of == stage)
        for table, written in zip(tables, writing):
            entries = {position: table[call.binding[position]] for position in own}
            sizes.append(
                {
                    position: e.extent.constant * e.stride * dtype(e.dtype).itemsize
                    if position in written
                    else 0
                    for position, e in entries.items()
                }
            )
        first, intervals = tables[0], dict[Key, LiveInterval]()
        for position, buffer in sorted(own.items(), key=lambda item: item[1].first):
            number = call.binding[position]
            before = intervals.get(buffer.key, _NOTHING)  # the same memory in another view
            end = buffer.offset + min(of[position] for of in sizes)
            intervals[buffer.key] = LiveInterval(
                (*before.entries, number),
                first[number].first_handle,
                buffer.offset,
                buffer.end,
                min(max(end, before.written), buffer.end),
            )
        return list(intervals.values())

    def _cut_of_slot(self, variant: Variant, position: int, storage: str) -> Cut:
        slot = variant.number, position
        if slot not in self._slot_cuts:
            views = [v[position] for v in variant.views]
            self._slot_cuts[slot] = self.table.cut(views, [_stride(v, storage) for v in views])
        return self._slot_cuts[slot]

    def broadcast(self, numbers: DeviceNumbers) -> tuple[list[LoweredTemplate], Call]:
        """Per class, copies of every parameter and optimizer state that an earlier device also holds,
        from that device. No signals are needed, because no device writes memory that another device
        reads meanwhile.
        """
        graph, shapes = self.tensors.graph, self.tensors.shapes
        lasting = [
            t
            for t in graph.tensors
            if category_of(t.kind, t.spec.name) in ("parameters", "optimizer")
            and t.id not in self.tensors.files  # the host writes tensors in files on every device
        ]
        binding = tuple(self.tensor(t.id, flat=True) for t in lasting)
        slots = tuple(Slot("flat", t.id) for t in lasting)
        holders = {self.tensors.form(t.id): t for t in lasting}  # one tensor of each form is enough
        everyone = numbers.number_of_group(shapes.mesh.names)
        templates = []
        for device, stage, table in zip(shapes.kinds, self.stages, self.table.tables):
            sources = {
                form: self._holder(numbers, t)
                for form, t in holders.items()
                if stage in self.tensors.stages_of(t.id) and self._first_holder(t, device) != device
            }
            copies = []
            for slot, t in enumerate(lasting):
                source = sources.get(self.tensors.form(t.id))
                if source is not None:
                    e = table[binding[slot]]
                    view = Ref(slot, e.extent, e.cols, e.dtype, upper(e.tile_rows))
                    copies.append(_copy(f"broadcast:{t.spec.name}", view, everyone, source))
            templates.append(LoweredTemplate("broadcast", tuple(copies), slots, ()))
        return templates, Call(len(self.variants), binding)

    def _first_holder(self, tensor: TensorNode, device: int) -> int:
        """The device that a part is copied from."""
        layout = self.tensors.layout.storage[tensor.id]
        return self.tensors.shapes.holder(tensor.spec, layout, device, self.tensors.stages_of(tensor.id))

    def _holder(self, numbers: DeviceNumbers, tensor: TensorNode) -> Number:
        """The number of the device that a part is copied from."""
        spec, layout = tensor.spec, self.tensors.layout.storage[tensor.id]
        key = "holder", tuple(zip(spec.shape, spec.labels, layout)), self.tensors.stages_of(tensor.id)
        return numbers.place(key, lambda device: self._first_holder(tensor, device))


def _copy(label: str, ref: Ref, group: int, source: Number) -> Instruction:
    """Copy a tensor from a member of a device group, whose view of it is the same."""
    own = Operand(ref.slot, Mode.ROW)
    copy = make_instruction(
        "copy_pairs",
        maker="the broadcast",
        label=label,
        extent=ref.extent,
        step=ref.tile_rows,
        dtype=ref.dtype,
        tiles={"dst": [own], "src": [own._replace(group=group, member=source)]},
        ref_of=lambda _: ref,
    )
    return copy.freeze()


def _stride(view: Ref, storage: str) -> int:
    return round_up(view.cols, 2) if view.packed or storage == "packed" else view.cols
