"""What a plan is made of: layer calls, and runs of root ops between them, each lowered like a template."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.op import op_named

__all__ = ["Segment", "accumulated_tensors", "cut_segments"]


@dataclass(frozen=True)
class Segment:
    """A layer call, or a run of root ops of one phase."""

    index: int
    phase: str
    ops: tuple[OpNode, ...]

    @property
    def call(self) -> OpNode | None:
        """The call op, for a layer."""
        return self.ops[0] if self.ops[0].op == "call" else None


def cut_segments(graph: Graph) -> tuple[Segment, ...]:
    """Root ops in order, cut at calls and where the phase changes."""
    runs: list[list[OpNode]] = []
    for op in graph.ops:
        fresh = not runs or op.op == "call" or runs[-1][-1].op == "call" or runs[-1][-1].phase != op.phase
        if fresh:
            runs.append([op])
        else:
            runs[-1].append(op)
    return tuple(Segment(i, ops[0].phase, tuple(ops)) for i, ops in enumerate(runs))


def accumulated_tensors(graph: Graph) -> frozenset[int]:
    """Tensors that are sums over the whole batch: complete only after the last microbatch."""
    inner: dict[str, frozenset[int]] = {}
    found: set[int] = set()
    for op in graph.ops:
        if op.op == "call":
            key = op.attrs["template"]
            template = graph.templates[key]
            if key not in inner:
                inner[key] = accumulated_tensors(template.graph)
            found.update(o for o, r in zip(op.outputs, template.results) if r in inner[key])
        else:
            found.update(op.outputs[i] for i in getattr(op_named(op.op), "accumulates", ()))
    return frozenset(found)
