"""Finds the tensors that are complete only after the last microbatch, and the ops that run once
after it.

Sums over the batch are accumulated over microbatches. Whatever is computed from them (the sum of a
weight's totals, a loss with several terms) waits for the last microbatch. An op that needs both
such a total and a part of the batch can run only if the whole batch is one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewise.core.errors import PlanError
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.op import op_named

_NONE: frozenset[int] = frozenset()

__all__ = ["BatchSums", "find_batch_sums", "require_whole_batch"]


@dataclass(frozen=True)
class BatchSums:
    """The ops of one graph or template that wait for the last microbatch.

    Attributes:
        complete_last: tensors that are complete only after the last microbatch: sums over the
            batch, with carries between microbatches, and tensors computed from sums.
        late_ops: ids of the ops that compute tensors from sums.
        calls: the same for the templates of its calls, by the call's op id.
    """

    complete_last: frozenset[int]
    late_ops: frozenset[int]
    calls: Mapping[int, BatchSums]


def find_batch_sums(graph: Graph, complete: frozenset[int] = frozenset()) -> BatchSums:
    """Find the sums over the batch of a graph, and what depends on them. `complete` are arguments
    that depend on such sums.
    """
    sums_by_call: dict[tuple[str, frozenset[int]], BatchSums] = {}
    late_ops: set[int] = set()
    calls: dict[int, BatchSums] = {}
    complete_last = {*complete}
    for op in graph.ops:
        late_inputs = set() if complete_last.isdisjoint(op.inputs) else complete_last.intersection(op.inputs)
        if op.op == "call":
            template = graph.templates[op.attrs["template"]]
            inside = (
                frozenset(a for a, i in zip(template.arguments, op.inputs) if i in late_inputs)
                if late_inputs
                else _NONE
            )
            key = template.key, inside
            if key not in sums_by_call:
                sums_by_call[key] = find_batch_sums(template.graph, inside)
            calls[op.id] = inner = sums_by_call[key]
            results = zip(op.outputs, (*template.results, *op.attrs["saved"]))
            complete_last.update(output for output, result in results if result in inner.complete_last)
            continue
        if late_inputs and op.phase != "update":
            late_ops.add(op.id)
            complete_last.update(op.outputs)
        complete_last.update(op.outputs[i] for i in op_named(op.op).declared.accumulates)
    return BatchSums(frozenset(complete_last - complete), frozenset(late_ops), calls)


def require_whole_batch(graph: Graph, sums: BatchSums) -> None:
    """With several microbatches, reject ops that need a total of the batch before the last
    microbatch.

    Raises:
        PlanError: names the op.
    """
    for op in graph.ops:
        if op.op == "call":
            require_whole_batch(graph.templates[op.attrs["template"]].graph, sums.calls[op.id])
        elif op.id in sums.late_ops and (
            op_named(op.op).declared.accumulates or _counts_the_batch(graph, op)
        ):
            raise PlanError(
                "[plan.schedule] with several microbatches, no part of the batch may depend on a total over "
                f"the whole batch; got {op.label!r} ({op.op}); use accumulation=1, or a loss whose "
                "gradient does not depend on its own value"
            )


def _counts_the_batch(graph: Graph, op: OpNode) -> bool:
    tensors = (*(i for i in op.inputs if i is not None), *op.outputs)
    labels = [label for t in tensors for label in graph.spec(t).labels]
    return any(label is not None and label.is_summed_by_batch_splits for label in labels)
