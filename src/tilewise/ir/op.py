"""What an op must say about itself. Strategy and plan see ops through this interface only.

An op is one small class in `graph/ops/<family>.py`; `register` puts one instance of it into the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewise.core.errors import InternalError
from tilewise.ir.graph import OpNode, TensorSpec

__all__ = ["Factors", "Op", "op_named", "register"]


# Optional parts of an op, with their meaning when absent:
#   takes_packed(position, attrs)  whether an operand may be a weight in panels (no)
#   index_bounds(inputs, attrs)    position -> (low, high, other allowed value) of operands that hold indices (none)
#   accumulates                    outputs that are sums over the whole batch (none)
#   in_place, must_alias           (output, input) pairs that may, or must, share memory (none)


@dataclass(frozen=True)
class Factors:
    """Einsum-style names of the dims of every operand, for one mesh axis; expansion to a mesh is generic.

    A factor in `inputs` that no output has is contracted: sharding it leaves partial results, combined as `reduce`
    says (`sum`, `max`, or `select` where exactly one device holds a value). A factor in `whole` cannot be sharded.
    """

    inputs: tuple[tuple[str, ...] | None, ...]
    outputs: tuple[tuple[str, ...], ...]
    reduce: str = "sum"
    whole: frozenset[str] = frozenset()


class Op(Protocol):
    """One op, one place: shape rule, gradient, factors, lowering."""

    name: str

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """Specs of the outputs. Raises ShapeError for operands that do not fit."""

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Names of the operands' dims."""

    def gradient(self, tape: Any, op: OpNode, grads: Sequence[Any]) -> Sequence[Any]:
        """Contributions to the gradients of the inputs (None where there is none)."""

    def lower(self, low: Any, op: OpNode) -> None:
        """Emit the instructions of this op."""


_OPS: dict[str, Op] = {}


def register(cls: type) -> type:
    """Class decorator: one instance of `cls` becomes the op of its name."""
    instance = cls()
    _OPS[instance.name] = instance
    return cls


def op_named(name: str) -> Op:
    """The op of that name.

    Raises:
        InternalError: there is none.
    """
    if name not in _OPS:
        raise InternalError(
            f"[ir.op] ops must be registered before use; got {name!r}; known: {', '.join(sorted(_OPS))}"
        )
    return _OPS[name]
