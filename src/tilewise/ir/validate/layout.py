"""The rules of a laid-out graph: no partial result stays partial, and what shares rows is cut alike.

A contraction over a dim that several devices share gives each of them a summand only. Which contractions an op
completes stands in its factors; everything else is refused here, whatever the label, the axis or the op is called.
Microbatches cut the batch in time as devices cut it in space, so operands of one op must count the batch along the same
dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewise.core.dims import DimLabel
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import Axes
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import GraphLayout, TensorLayout, in_space, show_axes
from tilewise.ir.op import Factors, op_named

__all__ = ["contracted_axes", "validate_layout", "validate_microbatches"]


def validate_layout(graph: Graph, layout: GraphLayout) -> None:
    """Every contraction of a sharded factor is covered by a reduction, in layers too.

    Raises:
        LayoutError: names the op, the tensor, the dim and the axis.
    """
    for op in graph.ops:
        if op.op == "call":
            validate_layout(graph.templates[op.attrs["template"]].graph, layout.calls[op.id])
            continue
        factors = _factors(graph, op)
        for factor, tensor, dim, axes in _contracted(op, factors, layout.use):
            label = graph.spec(tensor).labels[dim]
            is_summed = factor in factors.by_leaves and label is not None and label.is_summed_by_leaves
            if not is_summed and factor not in factors.reduced:
                raise LayoutError(_refusal(graph, op, tensor, dim, axes, label))


def validate_microbatches(graph: Graph) -> None:
    """Operands that share a dim's factor all count the batch there, or none does; in layers too.

    Raises:
        LayoutError: names the op and both operands.
    """
    for op in graph.ops:
        if op.op == "call":
            validate_microbatches(graph.templates[op.attrs["template"]].graph)
            continue
        first: dict[str, tuple[int, bool]] = {}
        for tensor, names in zip(op.inputs, _factors(graph, op).inputs):
            for factor, label in zip(names or (), graph.spec(tensor).labels if tensor is not None else ()):
                is_batch = label is not None and label.is_summed_by_leaves
                other, was_batch = first.setdefault(factor, (tensor or 0, is_batch))
                if was_batch != is_batch:
                    a, b = (graph.spec(t).name or f"result {t}" for t in (other, tensor or 0))
                    raise LayoutError(
                        f"[ir.validate] accumulation cuts the batch, so operands must be labelled alike; got {a} and "
                        f"{b} in {op.label!r}, of which one counts the batch along {factor!r}; label both dims tw.BATCH"
                    )


def contracted_axes(graph: Graph, op: OpNode, layouts: Sequence[TensorLayout]) -> set[Axes]:
    """The mesh axes over which an op's partial results must be combined."""
    return {axes for _, _, _, axes in _contracted(op, _factors(graph, op), layouts)}


def _factors(graph: Graph, op: OpNode) -> Factors:
    return op_named(op.op).factors([None if i is None else graph.spec(i) for i in op.inputs], op.attrs)


def _contracted(
    op: OpNode, factors: Factors, layouts: Sequence[TensorLayout]
) -> Iterator[tuple[str, int, int, Axes]]:
    """Factor, tensor, dim and axes of every sharded dim that some output lacks."""
    for tensor, names in zip(op.inputs, factors.inputs):
        if tensor is None or names is None:
            continue
        for dim, (factor, given) in enumerate(zip(names, layouts[tensor])):
            axes = in_space(given)
            if axes and any(factor not in output for output in factors.outputs):
                yield factor, tensor, dim, axes


def _refusal(graph: Graph, op: OpNode, tensor: int, dim: int, axes: Axes, label: DimLabel | None) -> str:
    spec = graph.spec(tensor)
    name = spec.name or f"result {tensor}"
    kinds = ("input", "parameter", "constant")
    outside = [t.spec.name for t in graph.tensors if t.kind in kinds and label in t.spec.labels][:4]
    return (
        f"[ir.validate] a sum over a dim that devices share must be completed among them; got dim {dim} "
        f"({label.name if label else 'unlabelled'!r}, as in {', '.join(outside) or 'no input'}) of {name} {spec} on "
        f"axes {show_axes(axes)}, over which {op.op!r} of {op.label!r} completes no sum; take the label "
        "off that dim, or map it to no axis"
    )
