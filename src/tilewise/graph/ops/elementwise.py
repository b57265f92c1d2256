"""Elementwise and row-wise ops: sums, products, activations, gates (`activation(gate) * up`),
softmax and casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tilewise.core.dtypes import dtype
from tilewise.graph.ops.common import SOFTCAPS, incoming, require
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Specs, operand, register, result
from tilewise.ir.tape import Tape

__all__ = ["Cast"]


@register
class Add(Op):
    """`a + b`."""

    name = "add"
    a: int = operand("...", packed=True)
    b: int = operand("...", packed=True)
    out: int = result(like="a", in_place="a")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy for both."""
        dy = incoming(self, grads)
        return {"a": dy, "b": dy}


@register
class Multiply(Op):
    """`a * b`."""

    name = "multiply"
    a: int = operand("...", packed=True)
    b: int = operand("...", packed=True)
    out: int = result(like="a")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy times the other operand."""
        dy, a, b = incoming(self, grads), tape.use(self.a), tape.use(self.b)
        return {"a": tape.multiply(dy, b), "b": tape.multiply(dy, a)}


@register
class Scale(Op):
    """`factor * x`."""

    name = "scale"
    x: int = operand("...", packed=True)
    factor: float
    out: int = result(like="x")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """`factor * dy`."""
        return {"x": tape.scale(incoming(self, grads), self.factor)}


# ---- activations -------------------------------------------------------------------------------------------


class _Slope(Op):
    """Base of the gradients of functions of one element: dy times the slope at x."""

    dy: int = operand("...", packed=True)
    x: int = operand("...", packed=True)
    dx: int = result(like="dy", in_place="dy")


class _Activation(Op):
    """Base of functions whose gradient is computed from the operand."""

    slope: ClassVar[type[_Slope]]
    x: int = operand("...", packed=True)
    out: int = result(like="x")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """From the operand."""
        (dx,) = tape.op(self.slope(dy=incoming(self, grads), x=tape.use(self.x)))
        return {"x": dx}


@register
class AbsBackward(_Slope):
    """Gradient of `abs`: dy times the sign of x."""

    name = "abs_backward"


@register
class Abs(_Activation):
    """The absolute value."""

    name = "abs"
    slope = AbsBackward


class _GateSlope(Op):
    """Base of the gradients of gates."""

    dh: int = operand("...", packed=True)
    g: int = operand("...", packed=True)
    u: int = operand("...", packed=True)
    dg: int = result(like="dh", in_place="g")
    du: int = result(like="dh", in_place="u")


class _Gate(Op):
    """Base of gates: `activation(g) * u` in one pass; made by `graph.passes.fuse_gates`."""

    slope: ClassVar[type[_GateSlope]]
    g: int = operand("...", packed=True)
    u: int = operand("...", packed=True)
    h: int = result(like="g")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Both gradients in one pass."""
        dg, du = tape.op(self.slope(dh=incoming(self, grads), g=tape.use(self.g), u=tape.use(self.u)))
        return {"g": dg, "u": du}


@register
class SiluBackward(_Slope):
    """Gradient of `silu`. It does not overwrite dy."""

    name = "silu_backward"
    dx: int = result(like="dy")


@register
class Silu(_Activation):
    """`x * sigmoid(x)`."""

    name = "silu"
    slope = SiluBackward


@register
class SiluGateBackward(_GateSlope):
    """Gradients of `silu_gate`."""

    name = "silu_gate_backward"


@register
class SiluGate(_Gate):
    """`silu(g) * u`."""

    name = "silu_gate"
    slope = SiluGateBackward


@register
class ReluBackward(_Slope):
    """Gradient of `relu`."""

    name = "relu_backward"


@register
class Relu(_Activation):
    """`max(x, 0)`."""

    name = "relu"
    slope = ReluBackward


@register
class GeluBackward(_Slope):
    """Gradient of `gelu`."""

    name = "gelu_backward"


@register
class Gelu(_Activation):
    """`x` times the standard normal distribution function of `x`, computed with the error function."""

    name = "gelu"
    slope = GeluBackward


@register
class GeluTanhBackward(_Slope):
    """Gradient of `gelu_tanh`."""

    name = "gelu_tanh_backward"


@register
class GeluTanh(_Activation):
    """`x (1 + tanh u) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x³)`."""

    name = "gelu_tanh"
    slope = GeluTanhBackward


@register
class GeluTanhGateBackward(_GateSlope):
    """Gradients of `gelu_tanh_gate`."""

    name = "gelu_tanh_gate_backward"


@register
class GeluTanhGate(_Gate):
    """`gelu_tanh(g) * u`."""

    name = "gelu_tanh_gate"
    slope = GeluTanhGateBackward


class _SlopeOfResult(Op):
    """Base of the gradients of functions whose slope follows from their result y."""

    dy: int = operand("...", packed=True)
    y: int = operand("...", packed=True)
    dx: int = result(like="dy", in_place="dy")


class _FromResult(Op):
    """Base of functions whose slope follows from their result. `slope` is the op of the gradient."""

    slope: ClassVar[type[_SlopeOfResult]]
    x: int = operand("...", packed=True)
    out: int = result(like="x")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """From the result."""
        return {"x": tape.op(self.slope(dy=incoming(self, grads), y=tape.use(self.out)))[0]}


@register
class TanhBackward(_SlopeOfResult):
    """Gradient of `tanh`."""

    name = "tanh_backward"


@register
class Tanh(_FromResult):
    """The hyperbolic tangent."""

    name = "tanh"
    slope = TanhBackward


@register
class SigmoidBackward(_SlopeOfResult):
    """Gradient of `sigmoid`."""

    name = "sigmoid_backward"


@register
class Sigmoid(_FromResult):
    """`1 / (1 + exp(-x))`."""

    name = "sigmoid"
    slope = SigmoidBackward


@register
class SoftcapBackward(Op):
    """Gradient of `softcap`."""

    name = "softcap_backward"
    dy: int = operand("...", packed=True)
    x: int = operand("...", packed=True)
    cap: float
    dx: int = result(like="dy", in_place="dy")


@register
class Softcap(Op):
    """`cap * tanh(x / cap)`."""

    name = "softcap"
    x: int = operand("...", packed=True)
    cap: float
    out: int = result(like="x")

    def check(self, spec: Specs) -> None:
        """The cap has a range."""
        low, high = SOFTCAPS
        rule = f"cap must lie in [{low:g}, {high:g}], not at {self.cap:g}"
        require(low <= self.cap <= high, self.name, rule, spec(self.x))

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """From the operand."""
        dy = incoming(self, grads)
        (dx,) = tape.op(SoftcapBackward(dy=dy, x=tape.use(self.x), cap=self.cap))
        return {"x": dx}


# ---- rows and types ----------------------------------------------------------------------------------------


class _RowBackward(Op):
    """Base of gradients of ops over the last dim, from their result y."""

    whole = "d"
    dy: int = operand("... d")
    y: int = operand("... d")
    dx: int = result(like="dy")


class _OverRow(Op):
    """Base of ops over the last dim. `slope` is the op of the gradient."""

    whole = "d"
    slope: ClassVar[type[_RowBackward]]
    x: int = operand("... d")
    y: int = result(like="x")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """From the result."""
        return {"x": tape.op(self.slope(dy=incoming(self, grads), y=tape.use(self.y)))[0]}


@register
class SoftmaxBackward(_RowBackward):
    """Gradient of `softmax`."""

    name = "softmax_backward"


@register
class Softmax(_OverRow):
    """`exp(x - max) / sum` over the last dim."""

    name = "softmax"
    slope = SoftmaxBackward


@register
class LogSoftmaxBackward(_RowBackward):
    """Gradient of `log_softmax`."""

    name = "log_softmax_backward"


@register
class LogSoftmax(_OverRow):
    """`x - max - log(sum(exp(x - max)))` over the last dim."""

    name = "log_softmax"
    slope = LogSoftmaxBackward


@register
class Cast(Op):
    """Conversion of `x` to another dtype, rounded to nearest even."""

    name = "cast"
    x: int = operand("...")
    dtype: str
    out: int = result(like="x")

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The same shape in the new dtype."""
        x = spec(self.x)
        is_other = {x.dtype.name, self.dtype} == {"f32", "bf16"}
        require(is_other, self.name, f"casts f32 to bf16 or back, not to {self.dtype}", x)
        return [TensorSpec(x.shape, dtype(self.dtype), x.labels, storage=x.storage)]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy, cast back."""
        back = "bf16" if self.dtype == "f32" else "f32"
        return {"x": tape.op(Cast(x=incoming(self, grads), dtype=back))[0]}

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        x, out = low.tensor(self.x), low.tensor(self.out)
        low.emit(f"cast_{x.dtype}_{out.dtype}", over=x, tiles={"out": low.row(out), "x": low.row(x)})
