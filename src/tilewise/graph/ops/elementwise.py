"""Elementwise and row-wise ops: sums, products, activations, gates (`activation(gate) * up`),
softmax and casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tilewise.core.dtypes import dtype
from tilewise.graph.ops.common import Elementwise, incoming, require
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, register
from tilewise.ir.tape import Gradient, Tape

__all__: list[str] = []

_CAPS = 1e-6, 1e6  # beyond, x / cap or its product with cap may leave the range of numbers


@register
class Add(Elementwise):
    """`a + b`."""

    name = "add"
    in_place = ((0, 0),)

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """dy for both."""
        dy = incoming(op, grads)
        return [dy, dy]


@register
class Multiply(Elementwise):
    """`a * b`."""

    name = "multiply"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """dy times the other operand."""
        dy = incoming(op, grads)
        a, b = (tape.use(i) for i in op.given)
        return [tape.multiply(dy, b), tape.multiply(dy, a)]


@register
class Scale(Elementwise):
    """`factor * x`."""

    name = "scale"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """`factor * dy`."""
        return [tape.scale(incoming(op, grads), op.attrs["factor"])]


@register
class Silu(Elementwise):
    """`x * sigmoid(x)`."""

    name = "silu"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """From the input."""
        return list(tape.op("silu_backward", [incoming(op, grads), tape.use(op.given[0])]))


@register
class SiluBackward(Elementwise):
    """Gradient of `silu`: inputs dy, x."""

    name = "silu_backward"


@register
class SiluGate(Elementwise):
    """`silu(gate) * up` in one pass; made from `silu` and `multiply` by `graph.passes.fuse_gates`."""

    name = "silu_gate"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """Both gradients in one pass."""
        gate, up = (tape.use(i) for i in op.given)
        return list(tape.op("silu_gate_backward", [incoming(op, grads), gate, up]))


@register
class SiluGateBackward(Elementwise):
    """Gradients of `silu_gate`: inputs dh, gate, up; outputs dgate, dup."""

    name = "silu_gate_backward"
    in_place = ((0, 1), (1, 2))


@register
class Relu(Elementwise):
    """`max(x, 0)`."""

    name = "relu"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """From the input."""
        return list(tape.op("relu_backward", [incoming(op, grads), tape.use(op.given[0])]))


@register
class ReluBackward(Elementwise):
    """Gradient of `relu`: inputs dy, x."""

    name = "relu_backward"
    in_place = ((0, 0),)


@register
class Gelu(Elementwise):
    """`x` times the standard normal distribution function of `x`, computed with the error function."""

    name = "gelu"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """From the input."""
        return list(tape.op("gelu_backward", [incoming(op, grads), tape.use(op.given[0])]))


@register
class GeluBackward(Elementwise):
    """Gradient of `gelu`: inputs dy, x."""

    name = "gelu_backward"
    in_place = ((0, 0),)


@register
class GeluTanh(Elementwise):
    """`x (1 + tanh u) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x³)`."""

    name = "gelu_tanh"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """From the input."""
        return list(tape.op("gelu_tanh_backward", [incoming(op, grads), tape.use(op.given[0])]))


@register
class GeluTanhBackward(Elementwise):
    """Gradient of `gelu_tanh`: inputs dy, x."""

    name = "gelu_tanh_backward"
    in_place = ((0, 0),)


@register
class GeluTanhGate(Elementwise):
    """`gelu_tanh(gate) * up` in one pass; made from `gelu_tanh` and `multiply` by
    `graph.passes.fuse_gates`.
    """

    name = "gelu_tanh_gate"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """Both gradients in one pass."""
        gate, up = (tape.use(i) for i in op.given)
        return list(tape.op("gelu_tanh_gate_backward", [incoming(op, grads), gate, up]))


@register
class GeluTanhGateBackward(Elementwise):
    """Gradients of `gelu_tanh_gate`: inputs dh, gate, up; outputs dgate, dup."""

    name = "gelu_tanh_gate_backward"
    in_place = ((0, 1), (1, 2))


@register
class Tanh(Elementwise):
    """The hyperbolic tangent."""

    name = "tanh"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """From the result."""
        return list(tape.op("tanh_backward", [incoming(op, grads), tape.use(op.outputs[0])]))


@register
class TanhBackward(Elementwise):
    """Gradient of `tanh`: inputs dy, y."""

    name = "tanh_backward"
    in_place = ((0, 0),)


@register
class Softcap(Elementwise):
    """`cap * tanh(x / cap)`."""

    name = "softcap"

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x."""
        cap = attrs["cap"]
        low, high = _CAPS
        require(
            low <= cap <= high, self.name, f"cap must lie in [{low:g}, {high:g}], not at {cap:g}", *inputs
        )
        return super().infer(inputs, attrs)

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """From the input."""
        return list(tape.op("softcap_backward", [incoming(op, grads), tape.use(op.given[0])], **op.attrs))


@register
class SoftcapBackward(Elementwise):
    """Gradient of `softcap`: inputs dy, x."""

    name = "softcap_backward"
    in_place = ((0, 0),)


class _Row(Elementwise):
    """Base of row-wise ops: the last dim is not sharded."""

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The factors of an elementwise op, except that the last dim cannot be sharded."""
        every = super().factors(inputs, attrs)
        return Factors(every.inputs, every.outputs, whole=frozenset(every.outputs[0][-1:]))

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """No: in panels, rows of a weight are not contiguous."""
        return False


@register
class Softmax(_Row):
    """`exp(x - max) / sum` over the last dim."""

    name = "softmax"

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """From the result."""
        return list(tape.op("softmax_backward", [incoming(op, grads), tape.use(op.outputs[0])]))


@register
class SoftmaxBackward(_Row):
    """Gradient of `softmax`: inputs dy, y."""

    name = "softmax_backward"


@register
class Cast(Elementwise):
    """Conversion to another dtype, rounded to nearest even; attribute `dtype`."""

    name = "cast"
    attributes = MappingProxyType({"dtype": str})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The same shape in the new dtype."""
        (x,) = inputs
        assert x is not None
        require(
            {x.dtype.name, attrs["dtype"]} == {"f32", "bf16"},
            "cast",
            f"casts f32 to bf16 or back, not to {attrs['dtype']}",
            x,
        )
        return [TensorSpec(x.shape, dtype(attrs["dtype"]), x.labels, storage=x.storage)]

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """No: panels of the two types are interleaved differently."""
        return False

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """dy, cast back."""
        back = "bf16" if op.attrs["dtype"] == "f32" else "f32"
        return list(tape.op("cast", [incoming(op, grads)], dtype=back))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        x, out = low.tensor(op.given[0]), low.tensor(op.outputs[0])
        low.emit(f"cast_{x.dtype}_{out.dtype}", op, over=x, tiles={"out": low.row(out), "x": low.row(x)})
