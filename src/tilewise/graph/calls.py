"""Builder methods of elementwise and row-wise ops, with their default values. The ops check the
arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tilewise.core.dims import MAX_SIZE
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.ir.graph import TensorNode

__all__ = ["RowCalls"]

_validate = Validator("graph", ShapeError)


class RowCalls(ABC):
    """A method per op. `GraphBuilder` derives from this class and defines how an op is appended."""

    @abstractmethod
    def op(self, name: str, inputs: Sequence[TensorNode | None], **attrs: Any) -> list[TensorNode]:
        """Append an op by name; returns its outputs."""

    def add(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """`a + b`."""
        return self.op("add", [a, b])[0]

    def add_bias(self, x: TensorNode, bias: TensorNode) -> TensorNode:
        """`x + bias`, with the vector `[n]` added to every row of `x` `[..., n]`."""
        return self.op("add_bias", [x, bias])[0]

    def multiply(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """`a * b`."""
        return self.op("multiply", [a, b])[0]

    def scale(self, x: TensorNode, factor: float) -> TensorNode:
        """`factor * x`."""
        return self.op("scale", [x], factor=factor)[0]

    def silu(self, x: TensorNode) -> TensorNode:
        """`x * sigmoid(x)`."""
        return self.op("silu", [x])[0]

    def relu(self, x: TensorNode) -> TensorNode:
        """`max(x, 0)`."""
        return self.op("relu", [x])[0]

    def gelu(self, x: TensorNode, *, approximate: str = "none") -> TensorNode:
        """`x` times the standard normal distribution function of `x`: exact (`none`), or
        approximated by `tanh`.
        """
        _validate.choice("gelu", "approximate", approximate, ("none", "tanh"))
        return self.op("gelu" if approximate == "none" else "gelu_tanh", [x])[0]

    def tanh(self, x: TensorNode) -> TensorNode:
        """The hyperbolic tangent."""
        return self.op("tanh", [x])[0]

    def softcap(self, x: TensorNode, cap: float) -> TensorNode:
        """`cap * tanh(x / cap)`."""
        return self.op("softcap", [x], cap=cap)[0]

    def softmax(self, x: TensorNode) -> TensorNode:
        """Softmax over the last dim."""
        return self.op("softmax", [x])[0]

    def cast(self, x: TensorNode, dtype: str) -> TensorNode:
        """`x` converted to `f32` or `bf16`."""
        return self.op("cast", [x], dtype=dtype_named(dtype).name)[0]

    def rms_norm(
        self,
        x: TensorNode,
        gamma: TensorNode,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        head_dim: int | None = None,
    ) -> TensorNode:
        """`x / sqrt(mean(x²) + eps) * (gamma + offset)` over the last dim, rounded once.

        Args:
            x: `[..., n]`.
            gamma: `[n]`, or `[head_dim]`.
            eps: above 0.
            offset: added to gamma; 1 in Gemma.
            head_dim: the last dim has adjacent heads of this size. Each is normalized separately,
                with one gamma.
        """
        size = 0 if head_dim is None else _validate.integer("rms_norm", "head_dim", head_dim, 1, MAX_SIZE)
        return self.op("rms_norm", [x, gamma], eps=eps, offset=offset, head_dim=size)[0]

    def layer_norm(
        self, x: TensorNode, gamma: TensorNode, beta: TensorNode, *, eps: float = 1e-5
    ) -> TensorNode:
        """`(x - mean(x)) / sqrt(variance(x) + eps) * gamma + beta` over the last dim, rounded once."""
        return self.op("layer_norm", [x, gamma, beta], eps=eps)[0]
