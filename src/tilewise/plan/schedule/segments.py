"""The segments of a plan: layer calls, and runs of root ops between them. Each is lowered like a
template.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.ir.graph import Graph, OpNode

__all__ = ["Segment", "cut_segments"]


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

    def name(self, graph: Graph) -> str:
        """The name of the template that it is lowered to."""
        return (
            f"segment{self.index}" if self.call is None else graph.templates[self.call.attrs["template"]].key
        )


def tensors_seen(graph: Graph, call: OpNode) -> dict[int, int]:
    """Tensors of a layer that its caller sees, by their ids inside: the operand or result of the
    call that each is.
    """
    template = graph.templates[call.attrs["template"]]
    names = (*template.arguments, *template.results, *call.attrs["saved"])
    outside = (*call.inputs, *call.outputs)
    return {n: i for i, (n, t) in enumerate(zip(names, outside)) if t is not None}


def cut_segments(graph: Graph) -> tuple[Segment, ...]:
    """Root ops in order, divided at calls and where the phase changes."""
    runs: list[list[OpNode]] = []
    for op in graph.ops:
        fresh = not runs or op.op == "call" or runs[-1][-1].op == "call" or runs[-1][-1].phase != op.phase
        if fresh:
            runs.append([op])
        else:
            runs[-1].append(op)
    return tuple(Segment(i, ops[0].phase, tuple(ops)) for i, ops in enumerate(runs))
