"""Layers as small classes. An object describes a layer and its name; calling it with a tensor adds the
layer to the tensor's graph. Each is one of the functions of `nn.layers`.

    body = Sequential(Linear("fc1", 64), gelu, Linear("fc2", 10))
    y = body(x)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewise.core.dims import DimLabel
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.graph import GraphBuilder
from tilewise.ir.graph import TensorNode
from tilewise.nn import layers

__all__ = [
    "Conv1d",
    "Conv2d",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "RMSNorm",
    "Sequential",
    "gelu",
    "relu",
    "sigmoid",
    "silu",
    "tanh",
]

_validate = Validator("nn", ShapeError)


def _graph(x: TensorNode) -> GraphBuilder:
    owner = getattr(x, "owner", None)
    if not isinstance(owner, GraphBuilder):
        rule = "a layer needs a tensor of a graph that is being defined"
        _validate.invalid("module", rule, f"{x.spec}", "pass a result of a call of the graph")
    return owner


def gelu(x: TensorNode) -> TensorNode:
    """`GraphBuilder.gelu`."""
    return _graph(x).gelu(x)


def relu(x: TensorNode) -> TensorNode:
    """`GraphBuilder.relu`."""
    return _graph(x).relu(x)


def sigmoid(x: TensorNode) -> TensorNode:
    """`GraphBuilder.sigmoid`."""
    return _graph(x).sigmoid(x)


def silu(x: TensorNode) -> TensorNode:
    """`GraphBuilder.silu`."""
    return _graph(x).silu(x)


def tanh(x: TensorNode) -> TensorNode:
    """`GraphBuilder.tanh`."""
    return _graph(x).tanh(x)


class Sequential:
    """Layers one after another."""

    def __init__(self, *parts: Callable[[TensorNode], TensorNode]) -> None:
        self.parts = parts

    def __call__(self, x: TensorNode) -> TensorNode:
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True)
class Linear:
    """`nn.linear`, with the parameters `NAME.weight` and `NAME.bias`."""

    name: str
    out_features: int
    bias: bool = True
    in_label: DimLabel | None = None
    out_label: DimLabel | None = None

    def __call__(self, x: TensorNode) -> TensorNode:
        return layers.linear(
            _graph(x),
            x,
            f"{self.name}.weight",
            self.out_features,
            in_label=self.in_label,
            out_label=self.out_label,
            bias=self.bias,
        )


@dataclass(frozen=True)
class Embedding:
    """`nn.embedding`, with the table `NAME.weight`; it is called with ids."""

    name: str
    num_embeddings: int
    width: int
    dtype: str = "f32"
    vocab_label: DimLabel | None = None

    def __call__(self, x: TensorNode) -> TensorNode:
        sizes = self.num_embeddings, self.width
        options = {"dtype": self.dtype, "vocab_label": self.vocab_label}
        return layers.embedding(_graph(x), x, f"{self.name}.weight", *sizes, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerNorm:
    """`nn.layer_norm`."""

    name: str
    eps: float = 1e-5

    def __call__(self, x: TensorNode) -> TensorNode:
        return layers.layer_norm(_graph(x), x, self.name, eps=self.eps)


@dataclass(frozen=True)
class RMSNorm:
    """`nn.rms_norm`, with the vector `NAME.weight`."""

    name: str
    eps: float = 1e-6

    def __call__(self, x: TensorNode) -> TensorNode:
        return layers.rms_norm(_graph(x), x, f"{self.name}.weight", eps=self.eps)


@dataclass(frozen=True)
class Dropout:
    """`GraphBuilder.dropout`."""

    p: float

    def __call__(self, x: TensorNode) -> TensorNode:
        return _graph(x).dropout(x, self.p)


@dataclass(frozen=True)
class MultiHeadAttention:
    """`nn.multi_head_attention`; it is called with a tensor, and perhaps a context."""

    name: str
    num_heads: int
    causal: bool = False

    def __call__(self, x: TensorNode, context: TensorNode | None = None) -> TensorNode:
        graph = _graph(x)
        return layers.multi_head_attention(
            graph, x, self.name, self.num_heads, context=context, causal=self.causal
        )


@dataclass(frozen=True)
class Conv2d:
    """`nn.conv2d`."""

    name: str
    out_channels: int
    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    bias: bool = True

    def __call__(self, x: TensorNode) -> TensorNode:
        return layers.conv2d(_graph(x), x, **vars(self))


@dataclass(frozen=True)
class Conv1d:
    """`nn.conv1d`."""

    name: str
    out_channels: int
    kernel_size: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    bias: bool = True

    def __call__(self, x: TensorNode) -> TensorNode:
        return layers.conv1d(_graph(x), x, **vars(self))
