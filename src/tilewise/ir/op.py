"""What an op must say about itself. Strategy and plan see ops through this interface only.

An op is one small class in `graph/ops/<family>.py`; `register` puts one instance of it into the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilewise.core.border import Border, shown
from tilewise.core.errors import InternalError, ShapeError
from tilewise.ir.graph import OpNode, TensorSpec

__all__ = ["Factors", "Op", "Signature", "check_call", "op_named", "register"]

_border = Border("graph", ShapeError)

# Optional parts of an op, with their meaning when absent:
#   takes_packed(position, attrs)  whether an operand may be a weight in panels (no)
#   index_bounds(inputs, attrs)    position -> (low, high, other allowed value) of operands that hold indices (none)
#   accumulates                    outputs that are sums over the whole batch (none)
#   in_place, must_alias           (output, input) pairs that may, or must, share memory (none)


@dataclass(frozen=True)
class Signature:
    """How an op is called. What does not follow it is refused before the op's own code sees it.

    Attributes:
        operands: how many, or a function of the attributes; None for any number from one on.
        absent: positions of operands that may be None.
        attributes: type per attribute; all must be given. Integers lie in 32 bits, floats are finite.
    """

    operands: int | Callable[[Mapping[str, Any]], int] | None
    absent: frozenset[int] = frozenset()
    attributes: Mapping[str, type] = field(default_factory=dict)


@dataclass(frozen=True)
class Factors:
    """Einsum-style names of the dims of every operand, for one mesh axis; expansion to a mesh is generic.

    A factor of the inputs that an output lacks is contracted there: sharding it leaves a partial result on every
    device. `ir.validate` refuses that unless the op says that its lowering combines the partials.

    Attributes:
        inputs, outputs: names per dim; None for an absent operand.
        whole: factors that cannot be sharded.
        reduced: contracted factors whose partials the lowering combines over the devices that shard them.
        by_leaves: the same along the tree over the batch's leaves, so only for dims that count the batch.
    """

    inputs: tuple[tuple[str, ...] | None, ...]
    outputs: tuple[tuple[str, ...], ...]
    whole: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    by_leaves: frozenset[str] = frozenset()


class Op(Protocol):
    """One op, one place: how it is called, shape rule, gradient, factors, lowering."""

    name: str

    @property
    def signature(self) -> Signature:
        """How it is called."""

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """Specs of the outputs. Raises ShapeError for operands that do not fit."""

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Names of the operands' dims."""

    def gradient(self, tape: Any, op: OpNode, grads: Sequence[Any]) -> Sequence[Any]:
        """Contributions to the gradients of the inputs (None where there is none)."""

    def lower(self, low: Any, op: OpNode) -> None:
        """Emit the instructions of this op."""


_OPS: dict[str, Op] = {}
_MAX_INT = (1 << 31) - 1


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


def check_call(name: str, operands: Sequence[object | None], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Hold a call to the op's signature; returns the attributes, each of its declared type.

    Raises:
        ShapeError: no such op, another number of operands, one that is missing, an attribute that is missing, unknown
            or of another type.
    """
    _border.choice("op", "an op's name", name, sorted(_OPS))
    signature = _OPS[name].signature
    odd = sorted({*attrs} ^ {*signature.attributes})
    if odd:
        wanted = ", ".join(signature.attributes) or "none"
        _border.refuse(name, f"attributes are {wanted}", f"{odd[0]!r} missing or unknown", "correct the call")
    checked = {a: _attribute(name, a, attrs[a], kind) for a, kind in signature.attributes.items()}
    wanted_operands = signature.operands
    count = wanted_operands(checked) if callable(wanted_operands) else wanted_operands
    if len(operands) != count and (count is not None or not operands):
        _border.refuse(
            name, f"takes {count or 'at least one'} operands", str(len(operands)), "correct the call"
        )
    for position, operand in enumerate(operands):
        if operand is None and position not in signature.absent:
            _border.refuse(name, f"operand {position} must be given", "None", "pass a tensor of the graph")
    return checked


def _attribute(op: str, name: str, value: Any, kind: type) -> Any:
    if kind is float:
        return _border.number(op, name, value)
    if kind is int:
        return _border.integer(op, name, value, -_MAX_INT - 1, _MAX_INT)
    if kind is bool:
        return _border.truth(op, name, value)
    if not isinstance(value, kind):
        _border.refuse(op, f"{name} must be a {kind.__name__}", shown(value), "correct the call")
    return value
