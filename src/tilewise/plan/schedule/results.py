"""The results that segments pass to later segments, with the segments in which they are live."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.reshards import is_prefetch
from tilewise.plan.memory import OFFLOADED, Buffer
from tilewise.plan.schedule.root_tensors import RootTensors
from tilewise.plan.schedule.segments import Segment

__all__ = ["result_buffers"]


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
