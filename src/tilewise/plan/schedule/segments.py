"""The segments of a plan: layer calls, and runs of root ops between them. Each is lowered like a
template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.ir.batch_sums import BatchSums, find_batch_sums
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import StageLayout
from tilewise.ir.reshards import is_prefetch
from tilewise.ir.schedule import SegmentPlace

__all__ = ["SeenTensors", "Segment", "cut_segments", "places_of", "tensors_seen"]


@dataclass(frozen=True)
class Segment:
    """A layer call, a move between stages of a pipeline, or a run of other root ops of one phase
    and stage.
    """

    index: int
    phase: str
    ops: tuple[OpNode, ...]

    @property
    def call(self) -> OpNode | None:
        """The call op, for a layer."""
        return self.ops[0] if self.ops[0].op == "call" else None

    @property
    def is_move(self) -> bool:
        """Whether it moves a tensor between stages."""
        return self.ops[0].op == "move"

    def name(self, graph: Graph) -> str:
        """The name of the template that it is lowered to."""
        return (
            f"segment{self.index}" if self.call is None else graph.templates[self.call.attrs["template"]].key
        )


class SeenTensors:
    """The tensors of layers that their callers read, computed once per call."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._of_calls: dict[int, dict[int, int]] = {}

    def of(self, call: OpNode) -> dict[int, int]:
        """As `tensors_seen`."""
        seen = self._of_calls.get(call.id)
        if seen is None:
            seen = self._of_calls[call.id] = tensors_seen(self.graph, call)
        return seen


def tensors_seen(graph: Graph, call: OpNode) -> dict[int, int]:
    """Tensors of a layer that its caller sees, by their ids inside: the operand or result of the
    call that each is.
    """
    template = graph.templates[call.attrs["template"]]
    names = (*template.arguments, *template.results, *call.attrs["saved"])
    outside = (*call.inputs, *call.outputs)
    return {n: i for i, (n, t) in enumerate(zip(names, outside)) if t is not None}


def cut_segments(graph: Graph, stages: StageLayout | None = None) -> tuple[Segment, ...]:
    """Root ops in order, divided at calls and moves, and where the phase or the stage changes; in a
    pipeline also where ops begin or end that run only after the last microbatch.
    """
    runs: list[list[OpNode]] = []
    last: object = None
    late = frozenset[int]() if stages is None else find_batch_sums(graph).late_ops
    for op in graph.ops:
        stands_alone = op.op in ("call", "move")
        kind: object = None
        if not stands_alone:
            kind = op.phase
            if stages is not None:
                kind = (op.phase, stages.ops[op.id], stages.is_weight_part(op.id), op.id in late)
        if kind is None or kind != last:
            runs.append([op])
        else:
            runs[-1].append(op)
        last = kind
    return tuple(Segment(i, ops[0].phase, tuple(ops)) for i, ops in enumerate(runs))


def places_of(
    graph: Graph, stages: StageLayout | None, segments: Sequence[Segment], sums: BatchSums
) -> tuple[SegmentPlace, ...]:
    """What a schedule needs to know of each segment."""
    if stages is None:
        return tuple(SegmentPlace(segment.phase) for segment in segments)  # type: ignore[arg-type]
    once = _that_run_once(graph, segments)
    places = []
    for segment in segments:
        first = segment.ops[0]
        stage = stages.ops[first.id]
        is_last = segment.call is None and segment.phase != "update" and first.id in sums.late_ops
        place = SegmentPlace(
            segment.phase,  # type: ignore[arg-type]
            stage,
            first.attrs["source"] if segment.is_move else stage,
            "first" if segment.index in once else "last" if is_last else "each",
            stages.is_weight_part(first.id),
        )
        places.append(place)
    return tuple(places)


def _that_run_once(graph: Graph, segments: Sequence[Segment]) -> set[int]:
    """The segments that copy weights which other stages or the other pass read as well: their results
    are the same in all microbatches.
    """
    constant = {t.id for t in graph.tensors if t.kind in ("parameter", "state")}
    readers, copies = _phases_of_readers(graph), list[Segment]()
    for segment in segments:
        first = segment.ops[0]
        is_copy = segment.is_move or is_prefetch(graph, first)
        if segment.phase != "update" and is_copy and constant.issuperset(first.inputs):
            constant.update(first.outputs)
            copies.append(segment)
    once: set[int] = set()
    needed: set[int] = set()  # what such segments read
    for segment in reversed(copies):
        first = segment.ops[0]
        is_kept = any(readers.get(o, set()) - {segment.phase} for o in first.outputs)
        if segment.is_move or is_kept or not needed.isdisjoint(first.outputs):
            once.add(segment.index)
            needed.update(first.given)
    return once


def _phases_of_readers(graph: Graph) -> dict[int, set[str]]:
    """The phases whose ops read each result of a prefetching call or a move."""
    prefetched = {o for op in graph.ops if op.op == "move" or is_prefetch(graph, op) for o in op.outputs}
    readers: dict[int, set[str]] = {}
    for op in graph.ops:
        for t in prefetched.intersection(op.inputs):
            readers.setdefault(t, set()).add("move" if op.op == "move" else op.phase)
    return readers
