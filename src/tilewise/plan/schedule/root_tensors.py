"""The tensors of the root graph: which share memory, which exist for the whole run, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.reshards import is_prefetch
from tilewise.plan.memory import OFFLOADED, Buffer
from tilewise.plan.schedule.batch_sums import BatchSums
from tilewise.plan.schedule.segments import Segment
from tilewise.plan.shapes import LocalShapes, round_up

__all__ = ["RootTensors", "result_buffers"]


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
