"""The buffers of a device: tensors that exist for the whole run, results with their live intervals,
and temporaries of templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.program import Slot, memory_kind
from tilewise.ir.reshards import is_prefetch
from tilewise.plan.accumulation import BatchSums
from tilewise.plan.memory import FILE_PAGE, Buffer, place_lingering
from tilewise.plan.rings import place_of_use
from tilewise.plan.segments import Segment, tensors_seen
from tilewise.plan.shapes import LocalShapes, bytes_of, round_up
from tilewise.plan.variants import Use, Variant, Variants

__all__ = [
    "OFFLOADED",
    "RootTensors",
    "align_for_files",
    "apart",
    "carry_and_ring_buffers",
    "carry_or_ring_key",
    "category_of",
    "lasting_buffers",
    "own_key",
    "result_buffers",
    "template_buffers",
]

Key = tuple[object, ...]
_CATEGORIES = {"parameter": "parameters", "constant": "inputs", "input": "inputs"}
OFFLOADED = "offloaded"  # in the devices' files
_CARRY_CATEGORIES = {"carry": "carries", "stack": "carries", "ring": "rings"}  # category by kind of slot


class RootTensors:
    """The tensors of the root graph: which share memory, and which exist for the whole run.

    Args:
        graph, layout, shapes: the plan's graph, layout and local sizes.
        sums: tensors that are complete only after the last microbatch.
        roots: tensor -> tensor whose memory it shares.

    Attributes:
        keep: outputs of the graph, which users read after a run.
        files: tensors in the devices' files.
        gradients: members of `keep` that the backward pass computes. Until then activations use
            their memory.
    """

    def __init__(
        self,
        graph: Graph,
        layout: GraphLayout,
        shapes: LocalShapes,
        sums: BatchSums,
        roots: dict[int, int],
    ) -> None:
        self.graph, self.layout, self.shapes = graph, layout, shapes
        self.sums, self.roots = sums, roots
        self.keep = frozenset(graph.outputs.values())
        self.files = frozenset(layout.files)
        self._forms = _numbers_of_forms(graph, layout)
        self._bytes: dict[int, int] = {}
        self.gradients = _gradients(graph, sums, self.files) - {*roots}
        self._is_lasting = [
            t.kind != "result" or (t.id in self.keep and t.id not in roots and t.id not in self.gradients)
            for t in graph.tensors
        ]

    def form(self, tensor: int) -> int:
        """A number that tensors with equal shape, kind and layout share."""
        return self._forms[tensor]

    def bytes(self, tensor: int) -> int:
        """Bytes of its largest part on any device, in one microbatch."""
        form = self._forms[tensor]
        size = self._bytes.get(form)
        if size is None:
            size = self._bytes[form] = self.shapes.bytes_max(
                self.graph.spec(tensor), self.layout.compute[tensor]
            )
        return size

    def num_parts(self, tensor: int) -> int:
        """Number of parts that are read or written separately: one per microbatch if the tensor
        counts the batch.
        """
        if self.shapes.settings.accumulation == 1:
            return 1
        node = self.graph.tensors[tensor]
        label = node.spec.labels[0]
        if label is None or not label.is_summed_by_batch_splits:
            return 1
        lasting = node.kind in ("input", "constant") or (
            tensor in self.keep and tensor not in self.sums.complete_last
        )
        return self.shapes.settings.accumulation if lasting else 1

    def part_bytes(self, tensor: int) -> int:
        """Bytes from the beginning of one part to the beginning of the next."""
        return round_up(self.bytes(tensor), 64)

    def is_lasting(self, tensor: int) -> bool:
        """Whether it has its own memory for the whole run."""
        return self._is_lasting[tensor]


def _gradients(graph: Graph, sums: BatchSums, files: frozenset[int]) -> frozenset[int]:
    """Outputs that the backward pass completes after its last microbatch. None if states are in
    files, because these are then prefetched into the memory that activations leave
    (`plan.prefetched_states`).
    """
    if any(t.id in files for t in graph.of_kind("state")):
        return frozenset()
    nodes = [graph.tensors[t] for t in graph.outputs.values() if t in sums.complete_last]
    return frozenset(
        t.id for t in nodes if t.producer is not None and graph.ops[t.producer].phase == "backward"
    )


def _numbers_of_forms(graph: Graph, layout: GraphLayout) -> list[int]:
    """A number per tensor, equal for equal forms. Specs that share an object are compared once."""
    numbers: dict[object, int] = {}
    alike: dict[tuple[int, str, int, int, bool], int] = {}
    form_numbers, files = [], frozenset(layout.files)
    for t, compute, storage in zip(graph.tensors, layout.compute, layout.storage):
        form = t.spec.form
        sort = id(form), t.kind, id(compute), id(storage), t.id in files
        number = alike.get(sort)
        if number is None:
            like = form, t.kind, compute, storage, t.id in files
            number = alike[sort] = numbers.setdefault(like, len(numbers))
        form_numbers.append(number)
    return form_numbers


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


def apart(buffers: Sequence[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
    """Buffers in memory, and buffers in the device's file."""
    return [b for b in buffers if b.category != OFFLOADED], [b for b in buffers if b.category == OFFLOADED]


def align_for_files(buffers: Sequence[Buffer]) -> None:
    """Round sizes up to whole pages of a file, so that every buffer begins at a page if the first
    does.
    """
    for buffer in buffers:
        buffer.bytes = round_up(buffer.bytes, FILE_PAGE)


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


def result_buffers(tensors: RootTensors, segments: Sequence[Segment]) -> list[Buffer]:
    """Results that are passed between segments, with the segments in which they are live. Gradients
    are live until the end.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    brief = {t.id for t in tensors.graph.tensors if not tensors.is_lasting(t.id)}
    for segment in segments:
        for op in segment.ops:
            if brief.isdisjoint(op.inputs) and brief.isdisjoint(op.outputs):
                continue
            for t in (*op.inputs, *op.outputs):
                root = None if t is None else tensors.roots.get(t, t)
                if root is not None and root in brief:
                    first.setdefault(root, segment.index)
                    last[root] = segment.index
    fetches = (op for op in tensors.graph.ops if op.phase != "update" and is_prefetch(tensors.graph, op))
    # tensors that wait for an update use the memory of activations
    gathered = {o for op in fetches for o in op.outputs}

    last.update(dict.fromkeys(tensors.gradients & first.keys(), segments[-1].index))

    def category(t: int) -> str:
        if t in tensors.gradients:
            return "gradients"
        return OFFLOADED if t in tensors.files else "gathered" if t in gathered else "activations"

    return [
        Buffer(("tensor", t), tensors.bytes(t), category(t), begin, last[t]) for t, begin in first.items()
    ]


def template_buffers(variant: Variant, base: int, room: int = 0) -> list[Buffer]:
    """Temporaries of one template, from byte `base` on.

    Args:
        variant: the lowered template.
        base: the first byte.
        room: bytes available to them. Temporaries that other devices read keep their bytes longer
            if there is room.
    """
    placed = [replace(b) for b in variant.temporaries]
    read = _read_by_others(variant)
    place_lingering(placed, [b for b in placed if b.key in read], room)
    return [replace(b, key=(b.key[0], variant.number, b.key[1]), offset=base + b.offset) for b in placed]


def _read_by_others(variant: Variant) -> set[Key]:
    """Keys of the temporaries that are read in other devices' memory."""
    slots = {o.slot for t in variant.templates for i in t.instructions for o in i.operands if o.group >= 0}
    return {own_key(variant.slots[slot]) for slot in slots}


def own_key(slot: Slot) -> Key:
    """The key, within its variant, of the temporary that a slot of a template refers to."""
    kind = memory_kind(slot.kind)
    return "inner" if kind == "tensor" else kind, slot.id
