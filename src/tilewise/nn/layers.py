"""The layers of the built-in models: each declares its parameters and uses them."""

from __future__ import annotations

from tilewise.core.dims import MAX_SIZE, DimLabel
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.graph import GraphBuilder
from tilewise.ir.graph import TensorNode

__all__ = ["layer_norm", "linear", "rms_norm"]

_validate = Validator("nn", ShapeError)


def linear(
    graph: GraphBuilder,
    x: TensorNode,
    name: str,
    out_features: int,
    *,
    in_label: DimLabel | None = None,
    out_label: DimLabel | None = None,
    init_scale: float = 1.0,
    bias: bool = False,
) -> TensorNode:
    """`x · wᵀ`, or `x · wᵀ + b`, with a new weight `[out_features, last dim of x]` with the dtype
    of x.

    Args:
        in_label: label of the weight's input dim, for strategies.
        out_label: label of its output dim.
        init_scale: see `GraphBuilder.parameter`.
        bias: add a new vector `[out_features]`, initially zeros. Its name ends in `.bias` where the
            weight's ends in `.weight`.

    Raises:
        ShapeError: the last dim of x has no fixed size, x cannot be multiplied, or the weight's
            name does not end in `.weight`; nothing is declared then.
    """
    inner = x.shape[-1]
    if not isinstance(inner, int):
        _validate.invalid(
            "linear", "the last dim must have a fixed size", f"{x.spec} for {name!r}", "reorder the dims"
        )
    with graph.all_or_nothing():
        weight = graph.parameter(
            [out_features, inner],
            x.spec.dtype,
            name=name,
            labels=[out_label, in_label],
            init_scale=init_scale,
        )
        y = graph.matmul(x, weight, trans_b=True)
        if not bias:
            return y
        vector = graph.parameter(
            [out_features], x.spec.dtype, name=_bias_of("linear", name), labels=[out_label], init="zeros"
        )
        return graph.add_bias(y, vector)


def rms_norm(
    graph: GraphBuilder,
    x: TensorNode,
    name: str,
    *,
    eps: float,
    offset: float = 0.0,
    head_dim: int | None = None,
) -> TensorNode:
    """RMS norm over the last dim, or over each head of it, with a new vector as gain.

    Args:
        eps: see `GraphBuilder.rms_norm`.
        offset: see `GraphBuilder.rms_norm`; the vector is initially ones, or zeros with an offset.
        head_dim: see `GraphBuilder.rms_norm`.
    """
    width = x.shape[-1]
    if head_dim is not None:
        width = _validate.integer("rms_norm", "head_dim", head_dim, 1, MAX_SIZE)
    init = "zeros" if _validate.number("rms_norm", "offset", offset) else "ones"
    with graph.all_or_nothing():
        gamma = graph.parameter([width], x.spec.dtype, name=name, init=init)
        return graph.rms_norm(x, gamma, eps=eps, offset=offset, head_dim=head_dim)


def layer_norm(graph: GraphBuilder, x: TensorNode, name: str, *, eps: float) -> TensorNode:
    """Layer norm over the last dim with two new vectors, initially ones and zeros.

    Args:
        name: prefix of the vectors' names, which end in `.weight` and `.bias`.
        eps: see `GraphBuilder.layer_norm`.
    """
    width = x.shape[-1]
    _validate.text("layer_norm", "a norm's name", name)
    with graph.all_or_nothing():
        gamma = graph.parameter([width], x.spec.dtype, name=f"{name}.weight")
        beta = graph.parameter([width], x.spec.dtype, name=f"{name}.bias", init="zeros")
        return graph.layer_norm(x, gamma, beta, eps=eps)


def _bias_of(call: str, name: str) -> str:
    """The name of the bias that belongs to a weight."""
    if not name.endswith(".weight"):
        _validate.invalid(
            call,
            "the name of a weight with a bias must end in '.weight'",
            f"{name!r} without '.weight' at its end",
            "append it",
        )
    return f"{name.removesuffix('.weight')}.bias"
