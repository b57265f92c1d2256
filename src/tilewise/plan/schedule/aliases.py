"""Finds the tensors that share memory because an op may write its result over an operand."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.op import op_named

__all__ = ["alias_roots"]


def alias_roots(graph: Graph, ops: Sequence[OpNode], keep: frozenset[int]) -> dict[int, int]:
    """Map tensors to the tensor whose memory they share, for ops that may write over an operand
    that no later op reads.

    An output shares the memory of at most one operand, and an operand's memory is given to at most
    one output. If two pairs exclude each other, the first is used. The memory of arguments is
    overwritten only by ops with `must_alias`.

    `keep` are tensors that are read after the ops (results, saved tensors, outputs).

    Raises:
        InternalError: two outputs must share the memory of one operand.
    """
    last: dict[int, int] = {}
    made: dict[int, int] = {}
    for n, op in enumerate(ops):
        for i in op.inputs:
            if i is not None:
                last[i] = n
        for o in op.outputs:
            made[o] = n
    roots: dict[int, int] = {}

    def root(tensor: int) -> int:
        while tensor in roots:
            tensor = roots[tensor]
        return tensor

    for n, op in enumerate(ops):
        if op.op == "call":
            continue
        cls = op_named(op.op)
        paired: set[int] = set()  # operands and outputs of this op that share memory
        for result, operand in cls.declared.in_place:
            source, out = op.inputs[operand], op.outputs[result]
            if source is None or source in paired or out in paired:
                if cls.must_alias and source is not None:
                    raise InternalError(
                        f"[plan.lower] outputs that must share an operand's memory need an operand each; got "
                        f"{graph.spec(source).name or source!r} twice in op {op.op!r} ({op.label}); pass it once"
                    )
                continue
            first = root(source)
            free = (
                last[source] == n
                and first in made
                and first not in keep
                and source not in keep
                and op.inputs.count(source) == 1
                and _lie_alike(graph, source, out)
            )
            if cls.must_alias or (free and out not in keep):
                roots[out] = first
            elif free:  # later ops read `out`, so both use its memory
                roots[first] = out
            else:
                continue
            paired |= {source, out}
    return {tensor: root(tensor) for tensor in roots}


def _lie_alike(graph: Graph, a: int, b: int) -> bool:
    """Whether two tensors have the same elements in the same order."""
    one, other = graph.spec(a), graph.spec(b)
    return (one.shape, one.dtype, one.storage) == (other.shape, other.dtype, other.storage)
