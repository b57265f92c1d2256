"""The tensors of the root graph: which share memory, how long each is live, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.batch_sums import BatchSums
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.reshards import is_prefetch
from tilewise.ir.schedule import Schedule, SegmentPlace
from tilewise.plan.memory import FILE_PAGE, OFFLOADED, Buffer
from tilewise.plan.schedule.lifetimes import Lifetime, Uses, find_lifetimes
from tilewise.plan.schedule.segments import Segment
from tilewise.plan.shapes import LocalShapes, round_up

__all__ = ["RootTensors", "result_buffers"]


class RootTensors:
    """The tensors of the root graph: which share memory, and which exist for the whole run.

    Args:
        graph, layout, shapes: the plan's graph, layout and local sizes.
        sums: tensors that are complete only after the last microbatch.
        roots: tensor -> tensor whose memory it shares.
        segments, places: the segments, and what schedules know of each.
        schedules: their order in a step on each stage.

    Attributes:
        keep: outputs of the graph, which users read after a run.
        files: tensors in the devices' files.
        gradients: members of `keep` that the backward pass computes. Until then activations use
            their memory.
        lifetimes: of results that are passed between segments, in the order in which they become
            live. Gradients are live until the end.
    """

    def __init__(
        self,
        graph: Graph,
        layout: GraphLayout,
        shapes: LocalShapes,
        sums: BatchSums,
        roots: dict[int, int],
        segments: Sequence[Segment],
        places: Sequence[SegmentPlace],
        schedules: Sequence[Schedule],
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
        self.lifetimes = self._find_lifetimes(segments, places, schedules)

    def _find_lifetimes(
        self,
        segments: Sequence[Segment],
        places: Sequence[SegmentPlace],
        schedules: Sequence[Schedule],
    ) -> dict[int, Lifetime]:
        brief = {t.id for t in self.graph.tensors if not self._is_lasting[t.id]}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        sent: dict[int, int] = {}
        for segment in segments:
            for op in segment.ops:
                if brief.isdisjoint(op.inputs) and brief.isdisjoint(op.outputs):
                    continue
                for t in (*op.inputs, *op.outputs):
                    root = None if t is None else self.roots.get(t, t)
                    if root is not None and root in brief:
                        first.setdefault(root, segment.index)
                        last[root] = segment.index
                        if op.op == "move" and t in op.inputs:
                            sent[root] = segment.index
        last.update(dict.fromkeys(self.gradients & first.keys(), segments[-1].index))
        only = {t: "last" for t in first if t in self.sums.complete_last}
        for segment, place in zip(segments, places):
            if place.microbatches != "each":
                only.update((o, place.microbatches) for op in segment.ops for o in op.outputs)
        uses = {t: Uses(begin, last[t], sent.get(t, -1), only.get(t, "")) for t, begin in first.items()}
        stage_of = {t: self.layout.stages_of(t)[0] for t in uses} if len(schedules) > 1 else {}
        accumulation = self.shapes.settings.accumulation
        return find_lifetimes(uses, stage_of, schedules, len(segments), accumulation)

    def form(self, tensor: int) -> int:
        """A number that tensors with equal shape, kind, layout and stages share."""
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

    def stages_of(self, tensor: int) -> tuple[int, ...]:
        """The stages of the pipeline that have it in memory."""
        return self.layout.stages_of(tensor)

    def part(self, tensor: int, microbatch: int) -> int:
        """The number of its part that a microbatch reads or writes."""
        if not microbatch:
            return 0
        lifetime = self.lifetimes.get(tensor)
        if lifetime is not None:
            return lifetime.slots[microbatch] if lifetime.slots else 0
        return microbatch if self.num_parts(tensor) > 1 else 0

    def num_parts(self, tensor: int) -> int:
        """Number of parts that are read or written separately: one per microbatch if the tensor
        counts the batch and is in memory for the whole run; as many as are in flight at one time if
        it is passed between segments.
        """
        if self.shapes.settings.accumulation == 1:
            return 1
        if tensor in self.lifetimes:
            return self.lifetimes[tensor].num_slots
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
        return round_up(self.bytes(tensor), FILE_PAGE if tensor in self.files else 64)

    def bytes_of_parts(self, tensor: int) -> int:
        """Bytes of all parts."""
        parts = self.num_parts(tensor)
        return self.bytes(tensor) if parts == 1 else self.part_bytes(tensor) * parts

    def is_lasting(self, tensor: int) -> bool:
        """Whether it has its own memory for the whole run."""
        return self._is_lasting[tensor]


def _gradients(graph: Graph, sums: BatchSums, files: frozenset[int]) -> frozenset[int]:
    """Outputs that the backward pass completes after its last microbatch. None if states are in
    files, because these are then prefetched into the memory that activations leave
    (`plan.schedule.prefetched_states`).
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
    alike: dict[tuple[int, str, int, int, bool, tuple[int, ...]], int] = {}
    form_numbers, files = [], frozenset(layout.files)
    for t, compute, storage in zip(graph.tensors, layout.compute, layout.storage):
        form, stages = t.spec.form, layout.stages_of(t.id)
        sort = id(form), t.kind, id(compute), id(storage), t.id in files, stages
        number = alike.get(sort)
        if number is None:
            like = form, t.kind, compute, storage, t.id in files, stages
            number = alike[sort] = numbers.setdefault(like, len(numbers))
        form_numbers.append(number)
    return form_numbers


def result_buffers(tensors: RootTensors, stage: int = 0) -> list[Buffer]:
    """Results that are passed between segments of a stage, with the segments in which they are live."""
    fetches = (op for op in tensors.graph.ops if op.phase != "update" and is_prefetch(tensors.graph, op))
    # tensors that wait for an update use the memory of activations
    gathered = {o for op in fetches for o in op.outputs}

    def category(t: int) -> str:
        if t in tensors.gradients:
            return "gradients"
        return OFFLOADED if t in tensors.files else "gathered" if t in gathered else "activations"

    return [
        Buffer(("tensor", t), tensors.bytes_of_parts(t), category(t), of.first, of.last)
        for t, of in tensors.lifetimes.items()
        if stage in tensors.stages_of(t)
    ]
