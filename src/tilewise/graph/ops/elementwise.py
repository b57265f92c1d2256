"""Ops on elements alone: add, multiply, scale, silu, silu_gate (`silu(gate) * up`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.graph.ops.common import Elementwise
from tilewise.ir.graph import OpNode
from tilewise.ir.op import register

__all__: list[str] = []


@register
class Add(Elementwise):
    """`a + b`."""

    name = kernel = "add"
    num_inputs = 2

    def gradient(self, tape: Any, op: OpNode, grads: Sequence[Any]) -> Sequence[Any]:
        """dy for both."""
        return [grads[0], grads[0]]


@register
class Multiply(Elementwise):
    """`a * b`."""

    name = kernel = "multiply"
    num_inputs = 2

    def gradient(self, tape: Any, op: OpNode, grads: Sequence[Any]) -> Sequence[Any]:
        """dy times the other."""
        a, b = (tape.use(i) for i in op.inputs)
        return [tape.multiply(grads[0], b), tape.multiply(grads[0], a)]


@register
class Scale(Elementwise):
    """`factor * x`."""

    name = kernel = "scale"

    def floats(self, attrs: Mapping[str, Any]) -> list[float]:
        """The factor."""
        return [attrs["factor"]]

    def gradient(self, tape: Any, op: OpNode, grads: Sequence[Any]) -> Sequence[Any]:
        """`factor * dy`."""
        return [tape.scale(grads[0], op.attrs["factor"])]


@register
class Silu(Elementwise):
    """`x * sigmoid(x)`."""

    name = kernel = "silu"

    def gradient(self, tape: Any, op: OpNode, grads: Sequence[Any]) -> Sequence[Any]:
        """From the input."""
        return tape.op("silu_backward", [grads[0], tape.use(op.inputs[0])])


@register
class SiluBackward(Elementwise):
    """Gradient of `silu`: inputs dy, x."""

    name = kernel = "silu_backward"
    num_inputs = 2


@register
class SiluGate(Elementwise):
    """`silu(gate) * up` in one pass; made from `silu` and `multiply` by `graph.passes.fuse_silu_gate`."""

    name = kernel = "silu_gate"
    num_inputs = 2

    def gradient(self, tape: Any, op: OpNode, grads: Sequence[Any]) -> Sequence[Any]:
        """Both gradients in one pass."""
        gate, up = (tape.use(i) for i in op.inputs)
        return tape.op("silu_gate_backward", [grads[0], gate, up])


@register
class SiluGateBackward(Elementwise):
    """Gradients of `silu_gate`: inputs dh, gate, up; outputs dgate, dup."""

    name = kernel = "silu_gate_backward"
    num_inputs = 3
    num_outputs = 2
    in_place = ((0, 1), (1, 2))
