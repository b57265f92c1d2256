"""The layers that models are made of: a weight or a vector declared and used."""

from __future__ import annotations

from tilewise.core.dims import DimLabel
from tilewise.core.errors import ShapeError
from tilewise.graph import GraphBuilder
from tilewise.ir.graph import TensorNode

__all__ = ["linear", "rms_norm"]


def linear(
    graph: GraphBuilder,
    x: TensorNode,
    name: str,
    out_features: int,
    *,
    in_label: DimLabel | None = None,
    out_label: DimLabel | None = None,
) -> TensorNode:
    """`x · wᵀ` with a new weight `[out_features, last dim of x]` in the dtype of x.

    Args:
        in_label, out_label: what the weight's dims count, for strategies.

    Raises:
        ShapeError: the last dim of x has no fixed size.
    """
    inner = x.shape[-1]
    if not isinstance(inner, int):
        raise ShapeError(
            f"[nn.linear] the last dim must have a fixed size; got {x.spec} for {name!r}; reorder the dims"
        )
    weight = graph.parameter([out_features, inner], x.spec.dtype, name=name, labels=[out_label, in_label])
    return graph.matmul(x, weight, transpose_b=True)


def rms_norm(graph: GraphBuilder, x: TensorNode, name: str, *, eps: float) -> TensorNode:
    """Root-mean-square norm over the last dim with a new vector of that size."""
    return graph.rms_norm(x, graph.parameter([x.shape[-1]], x.spec.dtype, name=name), eps=eps)
