"""The place stage: the buffers of a device, and their offsets in its arena and file.

Buffers for the whole run come first, then results of segments (`plan.schedule.result_buffers`), then
temporaries of templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewise.core.frozen import freeze_maps
from tilewise.ir.program import Slot, memory_kind
from tilewise.plan.lower import Use, Variant, Variants
from tilewise.plan.memory import (
    FILE_PAGE,
    OFFLOADED,
    Buffer,
    Placed,
    align_for_files,
    apart,
    file_begin_of,
    gap_for,
    memory_of,
    place_buffers,
    place_in_sequence,
    place_lingering,
)
from tilewise.plan.rings import place_of_use
from tilewise.plan.schedule import RootTensors, Scheduled, SeenTensors, prefetched_apart, result_buffers
from tilewise.plan.shapes import bytes_of, round_up

__all__ = ["Placement", "carry_or_ring_key", "category_of", "own_key", "place"]

Key = tuple[object, ...]
_CATEGORIES = {"parameter": "parameters", "constant": "inputs", "input": "inputs"}
_CARRY_CATEGORIES = {"carry": "carries", "stack": "carries", "ring": "rings"}  # category by kind of slot


@dataclass(frozen=True)
class Placement:
    """Where everything is in a device's memory and file; equal on all devices of a stage.

    Attributes:
        buffers: all buffers with their offsets.
        regions: bytes of the regions of the arena and of the file, by name: lasting, activations,
            temporaries, files.
    """

    buffers: tuple[Buffer, ...]
    regions: Mapping[str, int]

    def __post_init__(self) -> None:
        freeze_maps(self, "regions")

    @property
    def arena_bytes(self) -> int:
        """Bytes of a device's arena."""
        return memory_of(self.regions)

    @property
    def file_begin(self) -> int:
        """The address at which a device's file begins."""
        return file_begin_of(self.regions)

    @property
    def file_bytes(self) -> int:
        """Bytes of a device's file; 0 if nothing is offloaded."""
        return self.regions["files"]


def place(scheduled: Scheduled, lowered: Variants) -> tuple[Placement, ...]:
    """Give every buffer of a plan its offset, for the devices of each stage.

    Templates run one after another, so the temporaries of all templates start at one address.
    """
    return tuple(_place_stage(scheduled, lowered, stage) for stage in range(len(scheduled.schedules)))


def _place_stage(scheduled: Scheduled, lowered: Variants, stage: int) -> Placement:
    tensors = scheduled.tensors
    carries = _carry_and_ring_buffers(tensors, lowered, stage)
    lasting, lasting_in_file = apart([*carries, *_lasting_buffers(tensors, stage)])
    results, results_in_file = apart(result_buffers(tensors, stage))
    lasting, lasting_end = place_in_sequence(lasting, 0)
    if lasting_in_file or results_in_file:  # copies of tensors in files begin at a page
        lasting_end = round_up(lasting_end, FILE_PAGE)
        results, lasting_in_file, results_in_file = map(
            align_for_files, (results, lasting_in_file, results_in_file)
        )
    others, prefetched = prefetched_apart(scheduled.graph, results)
    results, end = _in_gaps(prefetched, *place_buffers(others, lasting_end), lasting_end)
    used = {use.variant for use in lowered.uses[stage]}
    variants = [variant for variant in lowered.variants if variant.number in used]
    room = max((b.end for variant in variants for b in variant.temporaries), default=0)
    temporaries = [b for variant in variants for b in _template_buffers(variant, end, room)]
    regions = {
        "lasting": lasting_end,
        "activations": end - lasting_end,
        "temporaries": max((b.end for b in temporaries), default=end) - end,
    }
    begin = file_begin_of(regions)
    lasting_in_file, file_end = place_in_sequence(lasting_in_file, begin)
    results_in_file, file_end = place_buffers(results_in_file, file_end)
    return Placement(
        (*lasting, *results, *temporaries, *lasting_in_file, *results_in_file),
        {**regions, "files": file_end - begin},
    )


def _in_gaps(prefetched: Sequence[Buffer], placed: Sequence[Buffer], end: int, base: int) -> Placed:
    """Placed buffers and prefetched states, in the order in which these were chosen."""
    everything = [*placed]
    for buffer in prefetched:
        everything.append(buffer._replace(offset=gap_for(buffer, everything, base)))
    return everything, max([end, *(b.end for b in everything[len(placed) :])])


def category_of(kind: str, name: str) -> str:
    """The category of memory use of an input, parameter, state or constant."""
    if kind == "state":
        return "optimizer" if name.startswith("optimizer.") else "state"
    return _CATEGORIES.get(kind, "activations")


def _lasting_buffers(tensors: RootTensors, stage: int) -> list[Buffer]:
    """Buffers for the whole run: parameters, optimizer states, constants, inputs of all
    microbatches, and outputs that do not reuse memory of activations.
    """
    buffers = []
    for t in tensors.graph.tensors:
        number = t.id
        if not tensors.is_lasting(number) or stage not in tensors.stages_of(number):
            continue
        category = _CATEGORIES.get(t.kind) or category_of(t.kind, t.spec.name)
        if number in tensors.files:
            category = OFFLOADED
        elif t.kind == "result":
            category = "gradients" if number in tensors.sums.complete_last else "outputs"
        buffers.append(Buffer(("tensor", number), tensors.bytes_of_parts(number), category))
    return buffers


def _carry_and_ring_buffers(tensors: RootTensors, variants: Variants, stage: int) -> list[Buffer]:
    """Carries and stacks of sums, and rings, as the variants need them."""
    bounds, seen = tensors.shapes.bounds, SeenTensors(tensors.graph)
    sizes: dict[Key, int] = {}
    slots_of_variants = [
        [
            (slot, max(bytes_of(views[i], bounds) for views in variant.views))
            for i, slot in enumerate(variant.slots)
            if memory_kind(slot.kind) in _CARRY_CATEGORIES
        ]
        for variant in variants.variants
    ]
    for use in variants.uses[stage]:
        for slot, size in slots_of_variants[use.variant]:
            key = carry_or_ring_key(seen, variants.variants[use.variant], use, slot)
            sizes[key] = max(size, sizes.get(key, 0))
    return [Buffer(key, size, _CARRY_CATEGORIES[str(key[0])]) for key, size in sizes.items()]


def carry_or_ring_key(tensors_of: SeenTensors, variant: Variant, use: Use, slot: Slot) -> Key:
    """The key of a carry, a stack or a place in a ring. Calls share a ring; a carry or a stack
    belongs to one tensor, a root tensor or one inside of a call.
    """
    kind, tensor, level = slot.memory
    if kind == "ring":
        return kind, variant.rings, tensor, place_of_use(use.ring_use, level)
    call = use.segment.call
    if call is None:
        return kind, None, tensor, level
    seen = tensors_of.of(call)
    if tensor not in seen:
        return kind, call.id, tensor, level
    return kind, None, (*call.inputs, *call.outputs)[seen[tensor]], level


def _template_buffers(variant: Variant, base: int, room: int = 0) -> list[Buffer]:
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
