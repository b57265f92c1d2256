"""The buffers of a device: tensors that exist for the whole run, carries and rings, and temporaries
of templates. `plan.schedule.results` has the results that are passed between segments.
"""

from __future__ import annotations

from tilewise.ir.graph import Graph
from tilewise.ir.program import Slot, memory_kind
from tilewise.plan.lower import Use, Variant, Variants
from tilewise.plan.memory import OFFLOADED, Buffer, place_lingering
from tilewise.plan.rings import place_of_use
from tilewise.plan.schedule import RootTensors, tensors_seen
from tilewise.plan.shapes import bytes_of

__all__ = [
    "carry_and_ring_buffers",
    "carry_or_ring_key",
    "category_of",
    "lasting_buffers",
    "own_key",
    "template_buffers",
]

Key = tuple[object, ...]
_CATEGORIES = {"parameter": "parameters", "constant": "inputs", "input": "inputs"}
_CARRY_CATEGORIES = {"carry": "carries", "stack": "carries", "ring": "rings"}  # category by kind of slot


def category_of(kind: str, name: str) -> str:
    """The category of memory use of an input, parameter, state or constant."""
    if kind == "state":
        return "optimizer" if name.startswith("optimizer.") else "state"
    return _CATEGORIES.get(kind, "activations")


def lasting_buffers(tensors: RootTensors) -> list[Buffer]:
    """Buffers for the whole run: parameters, optimizer states, constants, inputs of all
    microbatches, and outputs that do not reuse memory of activations.
    """
    buffers = []
    for t in tensors.graph.tensors:
        number = t.id
        if not tensors.is_lasting(number):
            continue
        category = _CATEGORIES.get(t.kind) or category_of(t.kind, t.spec.name)
        if number in tensors.files:
            category = OFFLOADED
        elif t.kind == "result":
            category = "gradients" if number in tensors.sums.complete_last else "outputs"
        size, parts = tensors.bytes(number), tensors.num_parts(number)
        if parts > 1:
            size = tensors.part_bytes(number) * parts
        buffers.append(Buffer(("tensor", number), size, category))
    return buffers


def carry_and_ring_buffers(tensors: RootTensors, variants: Variants) -> list[Buffer]:
    """Carries and stacks of sums, and rings, as the variants need them."""
    bounds = tensors.shapes.bounds
    sizes: dict[Key, int] = {}
    slots_of_variants = [
        [
            (slot, max(bytes_of(views[i], bounds) for views in variant.views))
            for i, slot in enumerate(variant.slots)
            if memory_kind(slot.kind) in _CARRY_CATEGORIES
        ]
        for variant in variants.variants
    ]
    for use in variants.uses:
        for slot, size in slots_of_variants[use.variant]:
            key = carry_or_ring_key(tensors.graph, variants.variants[use.variant], use, slot)
            sizes[key] = max(size, sizes.get(key, 0))
    return [Buffer(key, size, _CARRY_CATEGORIES[str(key[0])]) for key, size in sizes.items()]


def carry_or_ring_key(graph: Graph, variant: Variant, use: Use, slot: Slot) -> Key:
    """The key of a carry, a stack or a place in a ring. Calls share a ring; a carry or a stack
    belongs to one tensor, a root tensor or one inside of a call.
    """
    kind, tensor, level = slot.memory
    if kind == "ring":
        return kind, variant.rings, tensor, place_of_use(use.ring_use, level)
    call = use.segment.call
    if call is None:
        return kind, None, tensor, level
    seen = tensors_seen(graph, call)
    if tensor not in seen:
        return kind, call.id, tensor, level
    return kind, None, (*call.inputs, *call.outputs)[seen[tensor]], level


def template_buffers(variant: Variant, base: int, room: int = 0) -> list[Buffer]:
    """Temporaries of one template, from byte `base` on.

    Args:
        variant: the lowered template.
        base: the first byte.
        room: bytes available to them. Temporaries that other devices read keep their bytes longer
            if there is room.
    """
    placed = place_lingering(variant.temporaries, _read_by_others(variant), room)
    return [b._replace(key=(b.key[0], variant.number, b.key[1]), offset=base + b.offset) for b in placed]


def _read_by_others(variant: Variant) -> set[Key]:
    """Keys of the temporaries that are read in other devices' memory."""
    slots = {o.slot for t in variant.templates for i in t.instructions for o in i.operands if o.group >= 0}
    return {own_key(variant.slots[slot]) for slot in slots}


def own_key(slot: Slot) -> Key:
    """The key, within its variant, of the temporary that a slot of a template refers to."""
    kind = memory_kind(slot.kind)
    return "inner" if kind == "tensor" else kind, slot.id
