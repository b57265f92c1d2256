"""Which tensors share memory because an op may write its result over an operand."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.op import op_named

__all__ = ["alias_roots"]


def alias_roots(graph: Graph, ops: Sequence[OpNode], keep: frozenset[int]) -> dict[int, int]:
    """Tensor -> tensor whose memory it shares, for ops that may write over an operand that no later op reads.

    `keep` are tensors that others still read (results, saved tensors, outputs).
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
        rule = op_named(op.op)
        for result, given in rule.in_place:
            source, out = op.inputs[given], op.outputs[result]
            if source is None:
                continue
            free = (
                source in made and last[source] == n and source not in keep and op.inputs.count(source) == 1
            )
            if rule.must_alias or (free and out not in keep):
                roots[out] = root(source)
            elif free and root(source) not in keep:  # the memory is that of the tensor others will read
                roots[root(source)] = out
    return {tensor: root(tensor) for tensor in roots}
