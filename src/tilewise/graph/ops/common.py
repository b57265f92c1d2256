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
    alike = all(s.storage == given[0].storage for s in given)
    require(
        alike, op, "operands must lie alike", *given, advice="a weight and a result are stored differently"
    )


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
        require(first.dtype.name != "i32", self.name, "works on f32 and bf16", first, advice="cast it first")
        return [TensorSpec(first.shape, first.dtype, first.labels, storage=first.storage)] * self.num_outputs

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Weights may be treated element by element, as they lie."""
        return True

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """One factor per dim, shared by all operands."""
        assert inputs[0] is not None
        dims = tuple(f"d{i}" for i in range(len(inputs[0].shape)))
        return Factors((dims,) * self.num_inputs, (dims,) * self.num_outputs)

    def floats(self, attrs: Mapping[str, Any]) -> list[float]:
        """Attributes the kernel takes as floats."""
        return []

    def lower(self, low: Any, op: Any) -> None:
        """One task per row tile, or per block of panels."""
        is_packed = low.spec(op.inputs[0]).storage == "packed"
        view = low.flat if is_packed else low.tensor
        x = view(op.inputs[0])
        step = x.tile_rows if is_packed else low.row_step(x)
        operands = [low.row(view(o), "w") for o in op.outputs] + [low.row(view(i), "r") for i in op.inputs]
        low.emit(f"{self.kernel}_{x.dtype}", op, x.extent, step, operands, floats=self.floats(op.attrs))
