"""What the op families share: checks with both shapes in the message, names of leading dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.core.errors import ShapeError
from tilewise.ir.graph import TensorSpec
from tilewise.ir.op import Factors

__all__ = ["Elementwise", "leading", "require", "same_shape"]


def require(
    holds: bool, op: str, rule: str, *specs: TensorSpec | None, advice: str = "check the operands"
) -> None:
    """Raise ShapeError naming op, rule and the specs unless `holds`."""
    if not holds:
        got = ", ".join(str(s) for s in specs)
        raise ShapeError(f"[graph.{op}] {rule}; got {got}; {advice}")


def leading(spec: TensorSpec) -> tuple[str, ...]:
    """Factor names of all dims but the last: `b0`, `b1`, …"""
    return tuple(f"b{i}" for i in range(len(spec.shape) - 1))


def same_shape(op: str, *specs: TensorSpec | None) -> None:
    """All given specs have one shape and dtype."""
    given = [s for s in specs if s is not None]
    ok = all(s.shape == given[0].shape and s.dtype == given[0].dtype for s in given)
    require(ok, op, "operands must have one shape and dtype", *given, advice="cast or reshape one of them")


class Elementwise:
    """Base of ops that treat every element alone: all operands share shape, dtype and factors.

    Subclasses set `name`, `num_inputs`, and `kernel`, whose operands are the outputs and then the inputs.
    """

    name = ""
    num_inputs = 1
    num_outputs = 1
    kernel = ""

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """Every output has the spec of the first input."""
        require(len(inputs) == self.num_inputs, self.name, f"takes {self.num_inputs} operands", *inputs)
        same_shape(self.name, *inputs)
        first = inputs[0]
        assert first is not None
        return [TensorSpec(first.shape, first.dtype, first.labels)] * self.num_outputs

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """One factor per dim, shared by all operands."""
        assert inputs[0] is not None
        dims = tuple(f"d{i}" for i in range(len(inputs[0].shape)))
        return Factors((dims,) * self.num_inputs, (dims,) * self.num_outputs)

    def floats(self, attrs: Mapping[str, Any]) -> list[float]:
        """Attributes the kernel takes as floats."""
        return []

    def lower(self, low: Any, op: Any) -> None:
        """One task per row tile."""
        x = low.tensor(op.inputs[0])
        operands = [low.row(o, "w") for o in op.outputs] + [low.row(i, "r") for i in op.inputs]
        low.emit(
            f"{self.kernel}_{x.dtype}", op, x.extent, low.row_step(x), operands, floats=self.floats(op.attrs)
        )
