"""Elementwise arithmetic, comparisons and losses. Operands have one shape; `GraphBuilder` broadcasts."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import incoming
from tilewise.graph.ops.items import require_dims
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Specs, operand, optional, register, result
from tilewise.ir.tape import Tape

__all__ = ["Divide", "Equal"]


class _Binary(Op):
    """Base of ops on two tensors of one shape."""

    a: int = operand("...", packed=True)
    b: int = operand("...", packed=True)
    out: int = result(like="a")


class _Unary(Op):
    """Base of ops on one tensor."""

    x: int = operand("...", packed=True)
    out: int = result(like="x")


@register
class Subtract(_Binary):
    """`a - b`."""

    name = "subtract"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy and -dy."""
        dy = incoming(self, grads)
        return {"a": dy, "b": tape.scale(dy, -1.0)}


@register
class Divide(_Binary):
    """`a / b`."""

    name = "divide"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy / b, and -(dy / b) (a / b)."""
        (da,) = tape.op(Divide(a=incoming(self, grads), b=tape.use(self.b)))
        return {"a": da, "b": tape.scale(tape.multiply(da, tape.use(self.out)), -1.0)}


@register
class Shift(_Unary):
    """`x + value`."""

    name = "shift"
    value: float

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy."""
        return {"x": incoming(self, grads)}


class _Extreme(_Binary):
    """Base of maximum and minimum. Equal operands get half of the gradient each."""

    def _shares(self, tape: Tape, grads: Sequence[int | None], first: int, second: int) -> Gradients:
        dy, a, b = incoming(self, grads), tape.use(self.a), tape.use(self.b)
        at = {self.a: a, self.b: b}
        (one,) = tape.op(MaximumBackward(dy=dy, a=at[first], b=at[second]))
        (other,) = tape.op(MaximumBackward(dy=dy, a=at[second], b=at[first]))
        return {"a": one, "b": other}


@register
class MaximumBackward(Op):
    """The gradient of a in `maximum(a, b)`."""

    name = "maximum_backward"
    dy: int = operand("...", packed=True)
    a: int = operand("...", packed=True)
    b: int = operand("...", packed=True)
    da: int = result(like="dy", in_place="dy")


@register
class Maximum(_Extreme):
    """The larger of two elements; NaN if one is NaN."""

    name = "maximum"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy for the larger one."""
        return self._shares(tape, grads, self.a, self.b)


@register
class Minimum(_Extreme):
    """The smaller of two elements; NaN if one is NaN."""

    name = "minimum"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy for the smaller one: the larger one's share, with operands exchanged."""
        return self._shares(tape, grads, self.b, self.a)


@register
class Greater(_Binary):
    """1 where a > b, else 0. It has no gradient."""

    name = "greater"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The result is constant almost everywhere."""
        return {}


@register
class Equal(_Binary):
    """1 where a = b, else 0. It has no gradient."""

    name = "equal"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The result is constant almost everywhere."""
        return {}


@register
class EqualTo(Op):
    """1 where an integer is `value`, else 0, in rows of f32."""

    name = "equal_to"
    x: int = operand("...", dtype="i32")
    value: int
    out: int = result("...", dtype="f32")

    def check(self, spec: Specs) -> None:
        """Sizes are fixed."""
        require_dims(self.name, spec(self.x))

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The shape of x."""
        x = spec(self.x)
        return [TensorSpec(x.shape, DTYPES["f32"], x.labels, storage=x.storage)]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Integers have no gradient."""
        return {}

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        out = low.tensor(self.out)
        tiles = {"out": low.row(out), "x": low.row(self.x)}
        low.emit("equal_to", over=out, dtype="f32", tiles=tiles, ints={"value": self.value})


@register
class Select(Op):
    """a where the mask is not 0, b elsewhere; an absent operand is 0."""

    name = "select"
    mask: int = operand("...")
    a: int | None = optional("...")
    b: int | None = optional("...")
    out: int = result(like="mask")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy where the operand was chosen."""
        dy, mask, gradients = incoming(self, grads), tape.use(self.mask), {}
        if self.a is not None:
            gradients["a"] = tape.op(Select(mask=mask, a=dy, b=None))[0]
        if self.b is not None:
            gradients["b"] = tape.op(Select(mask=mask, a=None, b=dy))[0]
        return gradients


@register
class Exp(_Unary):
    """`e ** x`."""

    name = "exp"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy times the result."""
        return {"x": tape.multiply(incoming(self, grads), tape.use(self.out))}


@register
class Log(_Unary):
    """The natural logarithm."""

    name = "log"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy / x."""
        return {"x": tape.op(Divide(a=incoming(self, grads), b=tape.use(self.x)))[0]}


@register
class Sqrt(_Unary):
    """The square root."""

    name = "sqrt"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy / (2 sqrt(x))."""
        half = tape.scale(incoming(self, grads), 0.5)
        return {"x": tape.op(Divide(a=half, b=tape.use(self.out)))[0]}


@register
class Power(_Unary):
    """`x ** exponent`."""

    name = "power"
    exponent: float

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """`exponent * x ** (exponent - 1) * dy`."""
        if self.exponent == 1.0:
            return {"x": incoming(self, grads)}
        (slope,) = tape.op(Power(x=tape.use(self.x), exponent=self.exponent - 1))
        return {"x": tape.scale(tape.multiply(incoming(self, grads), slope), self.exponent)}


@register
class BceWithLogitsBackward(Op):
    """Gradient of the logits in `bce_with_logits`."""

    name = "bce_with_logits_backward"
    dy: int = operand("...")
    x: int = operand("...")
    target: int = operand("...")
    dx: int = result(like="dy", in_place="dy")


@register
class BceWithLogits(Op):
    """Binary cross-entropy of every logit: `max(x, 0) - x * target + log(1 + exp(-abs(x)))`."""

    name = "bce_with_logits"
    x: int = operand("...")
    target: int = operand("...")
    out: int = result(like="x")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """`dy * (sigmoid(x) - target)`, and `-dy * x`."""
        dy, x, target = incoming(self, grads), tape.use(self.x), tape.use(self.target)
        (dx,) = tape.op(BceWithLogitsBackward(dy=dy, x=x, target=target))
        return {"x": dx, "target": tape.scale(tape.multiply(dy, x), -1.0)}
