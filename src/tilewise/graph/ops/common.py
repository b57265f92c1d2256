"""What all families of ops use: checks whose messages contain the shapes of the operands."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.dims import Size
from tilewise.core.errors import PlanError, ShapeError
from tilewise.core.validation import Validator
from tilewise.ir.op import Op
from tilewise.ir.resolve import require, require_indices

__all__ = ["SOFTCAPS", "fixed", "incoming", "require", "require_indices", "require_positive"]

SOFTCAPS = 1e-6, 1e6
"""The range of caps. Beyond it, x / cap or its product with cap may leave the range of numbers."""

_validate = Validator("graph", ShapeError)


def require_positive(op: str, **values: float) -> None:
    """Check that attributes are above 0."""
    for name, value in values.items():
        if value <= 0:
            _validate.invalid(op, f"{name} must be above 0", f"{value}", "correct it")


def fixed(size: Size) -> int:
    """A size as an integer. `Op.check` must have checked that it is not a symbol."""
    assert isinstance(size, int)
    return size


def incoming(op: Op, grads: Sequence[int | None]) -> int:
    """The gradient of an op's first result, for ops whose other results have no gradient.

    Raises:
        PlanError: the loss depends on another result.
    """
    first, *others = grads
    if first is None or any(g is not None for g in others):
        number = next((i for i, g in enumerate(others, 1) if g is not None), 0)
        raise PlanError(
            f"[graph.gradients] a loss may depend only on the first result of {op.name!r}; got one that depends on "
            f"result {number} ({op.declared.results[number].name}); compute it by other ops"
        )
    return first
