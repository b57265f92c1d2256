"""The rules of a batch: tensors that share rows are divided alike, and sums over the batch are over
dims whose label has the batch role.

Microbatches divide the batch in time as devices divide it in space. So the operands of one op must
count the batch along the same dims, and gradients and losses must sum along these dims.
"""

from __future__ import annotations

from tilewise.core.errors import LayoutError
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.op import op_named

__all__ = ["validate_batch_sums", "validate_microbatches"]


def validate_microbatches(graph: Graph) -> None:
    """Check that operands that share a factor agree: in the dims with this factor, all operands
    count the batch or none does. Layers are checked too.

    Raises:
        LayoutError: names the op and both operands.
    """
    for template in graph.templates.values():
        validate_microbatches(template.graph)
    for op in graph.ops:
        if op.op == "call":
            continue
        first: dict[str, tuple[int, bool]] = {}
        for tensor, names in zip(op.inputs, factors_of(graph, op).inputs):
            for factor, label in zip(names or (), graph.spec(tensor).labels if tensor is not None else ()):
                is_batch = label is not None and label.is_summed_by_batch_splits
                other, was_batch = first.setdefault(factor, (tensor or 0, is_batch))
                if was_batch != is_batch:
                    a, b = (graph.spec(t).name or f"result {t}" for t in (other, tensor or 0))
                    raise LayoutError(
                        "[ir.validate] accumulation cuts the batch, so operands must be labelled alike; got "
                        f"{a} and {b} in {op.label!r}, of which one counts the batch along {factor!r}; label both dims "
                        "tw.BATCH"
                    )


def validate_batch_sums(graph: Graph) -> None:
    """Check that every op that sums over the batch sums a dim that counts the batch, if the graph
    has a batch. Layers are checked too.

    Raises:
        LayoutError: names the op.
    """
    for template in graph.templates.values():
        validate_batch_sums(template.graph)
    for op in graph.ops:
        if op.op == "call" or not op_named(op.op).declared.accumulates:
            continue
        if not _counts_what_it_sums(graph, op):
            raise LayoutError(
                "[ir.validate] in a graph with a batch, gradients and losses are sums over the batch; got "
                f"{op.label!r} ({op.op}), whose rows do not count it; label dim 0 of its inputs tw.BATCH"
            )


def _counts_what_it_sums(graph: Graph, op: OpNode) -> bool:
    factors = factors_of(graph, op)
    summed = {
        f for partial in factors.partial_values if partial.tree == BATCH_SPLITS for f in partial.factors
    }
    labels = [
        label
        for tensor, names in zip(op.inputs, factors.inputs)
        if tensor is not None and names is not None
        for factor, label in zip(names, graph.spec(tensor).labels)
        if factor in summed
    ]
    return not summed or any(label is not None and label.is_summed_by_batch_splits for label in labels)
