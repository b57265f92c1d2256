"""Layers as functions of a graph: each declares its parameters and uses them."""

from __future__ import annotations

from tilewise.core.dims import MAX_SIZE, DimLabel
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.graph import Adapter, GraphBuilder
from tilewise.ir.graph import TensorNode

__all__ = [
    "conv1d",
    "conv2d",
    "embedding",
    "layer_norm",
    "linear",
    "mlp",
    "multi_head_attention",
    "rms_norm",
]

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
    of x. If the graph has an adapter for the weight's name, its product is added (`graph.Adapter`).

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
        adapter = graph.adapters.get(name)
        added = None if adapter is None else _of_adapter(graph, x, weight, adapter)
        if not bias:
            return graph.matmul(x, weight, trans_b=True, residual=added)
        vector = graph.parameter(
            [out_features], x.spec.dtype, name=_bias_of("linear", name), labels=[out_label], init="zeros"
        )
        y = graph.add_bias(graph.matmul(x, weight, trans_b=True), vector)
        return y if added is None else graph.add(added, y)


def _of_adapter(graph: GraphBuilder, x: TensorNode, weight: TensorNode, adapter: Adapter) -> TensorNode:
    """`scale * (x aᵀ) bᵀ`. a has the label of the weight's input dim and b that of its output dim, so
    devices that share the weight share them too.
    """
    out_label, in_label = weight.spec.labels
    a_name, b_name = adapter.names(weight.spec.name)
    a_shape = [adapter.rank, weight.shape[1]]
    if not graph.has(a_name):
        graph.parameter(a_shape, x.spec.dtype, name=a_name, labels=[None, in_label])
    a = graph.find(a_name)
    low = graph.matmul(_dropped(graph, x, a, adapter), a, trans_b=True)
    if adapter.is_gated:
        low = graph.mul(low, _gate_of(graph, x, weight.spec.name))
    if adapter.scale != 1.0:
        low = graph.scale(low, adapter.scale)
    b_shape = [weight.shape[0], adapter.rank]
    b = graph.parameter(b_shape, x.spec.dtype, name=b_name, labels=[out_label, None], init="zeros")
    return graph.matmul(low, b, trans_b=True)


def _gate_of(graph: GraphBuilder, x: TensorNode, name: str) -> TensorNode:
    """The gates of the rows of x."""
    gate = next((gate for gate in graph.gates if gate.shape[:-1] == x.shape[:-1]), None)
    if gate is None:
        rule, advice = "a gated adapter needs gates for the rows of x", "set graph.gates before the product"
        _validate.invalid("linear", rule, f"none for {x.spec} of {name!r}", advice)
    return gate


def _dropped(graph: GraphBuilder, x: TensorNode, a: TensorNode, adapter: Adapter) -> TensorNode:
    """x after dropout. Adapters that share a and read the same x have one mask."""
    draft = graph.draft
    for op in draft.ops if adapter.shared and adapter.dropout else ():
        if op.op == "linear" and a.id in op.inputs:
            source = draft.tensors[op.given[0]]
            maker = None if source.producer is None else draft.ops[source.producer]
            if maker is not None and maker.op == "dropout" and maker.inputs[0] == x.id:
                return source
    return graph.dropout(x, adapter.dropout)


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


def embedding(
    graph: GraphBuilder,
    ids: TensorNode,
    name: str,
    num_embeddings: int,
    width: int,
    *,
    dtype: str = "f32",
    vocab_label: DimLabel | None = None,
    init_scale: float = 1.0,
) -> TensorNode:
    """Rows `[..., width]` of a new table `[num_embeddings, width]` at ids (i32, `[...]`)."""
    with graph.all_or_nothing():
        table = graph.parameter(
            [num_embeddings, width], dtype, name=name, labels=[vocab_label, None], init_scale=init_scale
        )
        return graph.embedding(ids, table)


def mlp(
    graph: GraphBuilder,
    x: TensorNode,
    name: str,
    hidden: int,
    *,
    out_features: int | None = None,
    activation: str = "gelu",
    label: DimLabel | None = None,
) -> TensorNode:
    """Two linear layers with biases and an activation between them.

    Args:
        name: prefix of the parameters' names, which end in `.fc1.weight`, `.fc1.bias`, `.fc2.weight` and
            `.fc2.bias`.
        hidden: features between them.
        out_features: features of the result; by default those of x.
        activation: `gelu`, `relu`, `silu`, `tanh` or `sigmoid`.
        label: label of the hidden dim, which devices may share.
    """
    _validate.choice("mlp", "activation", activation, ("gelu", "relu", "silu", "tanh", "sigmoid"))
    out = x.shape[-1] if out_features is None else out_features
    if not isinstance(out, int):
        _validate.invalid("mlp", "the last dim must have a fixed size", f"{x.spec}", "reorder the dims")
    with graph.all_or_nothing():
        h = linear(graph, x, f"{name}.fc1.weight", hidden, out_label=label, bias=True)
        h = getattr(graph, activation)(h)
        return linear(graph, h, f"{name}.fc2.weight", out, in_label=label, bias=True)


def multi_head_attention(
    graph: GraphBuilder,
    x: TensorNode,
    name: str,
    num_heads: int,
    *,
    context: TensorNode | None = None,
    causal: bool = False,
    attn_mask: TensorNode | None = None,
    label: str | None = "heads",
) -> TensorNode:
    """Attention of `x` `[batch, seq, width]` to itself, or to `context` `[batch, keys, width]`, with
    projections that have biases.

    Args:
        name: prefix of the parameters' names, which end in `.q.weight`, `.q.bias`, and so on, for q, k, v
            and out.
        num_heads: heads, each of `width / num_heads` elements.
        context: what x attends to; by default x.
        causal: a token attends to itself and to earlier tokens.
        attn_mask: see `GraphBuilder.scaled_dot_product_attention`.
        label: name of the label of the heads, which devices may share; None: no label.
    """
    width, heads = x.shape[-1], _validate.integer("multi_head_attention", "num_heads", num_heads, 1, MAX_SIZE)
    if not isinstance(width, int) or width % heads:
        rule = f"the last dim must hold {heads} heads"
        _validate.invalid("multi_head_attention", rule, f"{x.spec}", "choose another number of heads")
    of_heads = None if label is None else DimLabel(label, width // heads)
    with graph.all_or_nothing():
        source = x if context is None else context
        q, k, v = (
            linear(graph, y, f"{name}.{n}.weight", width, out_label=of_heads, bias=True)
            for n, y in (("q", x), ("k", source), ("v", source))
        )
        attended = graph.scaled_dot_product_attention(
            q, k, v, head_dim=width // heads, causal=causal, attn_mask=attn_mask
        )
        return linear(graph, attended, f"{name}.out.weight", width, in_label=of_heads, bias=True)


def conv2d(
    graph: GraphBuilder,
    x: TensorNode,
    name: str,
    out_channels: int,
    kernel_size: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    bias: bool = True,
) -> TensorNode:
    """Convolution of images `[batch, channels, height, width]` with a new weight `[out_channels, channels
    * kernel height * kernel width]`, which is PyTorch's with its last dims merged.

    Args:
        name: prefix of the parameters' names, which end in `.weight` and `.bias`.
        kernel_size: of the window: a number, or (height, width).
        stride: between windows: the same.
        padding: zeros around the image: the same.
        dilation: distance of the elements of a window: the same.
    """
    if len(x.shape) != 4 or not isinstance(x.shape[1], int):
        rule = "images must be [batch, channels, height, width]"
        _validate.invalid("conv2d", rule, f"{x.spec}", "reshape them")
    down, right = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    with graph.all_or_nothing():
        inner = x.shape[1] * down * right
        weight = graph.parameter([out_channels, inner], x.spec.dtype, name=f"{name}.weight")
        vector = None
        if bias:
            vector = graph.parameter([out_channels], x.spec.dtype, name=f"{name}.bias", init="zeros")
        return graph.conv2d(
            x, weight, vector, kernel_size=(down, right), stride=stride, padding=padding, dilation=dilation
        )


def conv1d(
    graph: GraphBuilder,
    x: TensorNode,
    name: str,
    out_channels: int,
    kernel_size: int,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    bias: bool = True,
) -> TensorNode:
    """Convolution of `[batch, channels, length]`, with parameters like those of `conv2d`."""
    if len(x.shape) != 3 or not isinstance(x.shape[1], int):
        _validate.invalid("conv1d", "x must be [batch, channels, length]", f"{x.spec}", "reshape it")
    with graph.all_or_nothing():
        weight = graph.parameter(
            [out_channels, x.shape[1] * kernel_size], x.spec.dtype, name=f"{name}.weight"
        )
        vector = None
        if bias:
            vector = graph.parameter([out_channels], x.spec.dtype, name=f"{name}.bias", init="zeros")
        return graph.conv1d(
            x, weight, vector, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
        )


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
