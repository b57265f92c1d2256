"""`Tape`: what a gradient rule writes to, and the contributions that it may return.

A contribution is a tensor's id, an op that is added only when the sum is formed (`Later`), or a
`Term` that one op combines with other terms. The gradient of a tensor is always summed in one
order:

1. ids and `Later`s, in reverse order of use: the contribution of the last user comes first;
2. terms, op by op (`Op.combine`): by ascending `combine_rank`, then by the names of the ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from tilewise.core.errors import InternalError

__all__ = ["Gradient", "Later", "Tape", "Term", "terms_of"]


@dataclass(frozen=True)
class Later:
    """The only output of an op that is added when the gradient is needed, after ops that are needed
    sooner.
    """

    op: str
    inputs: tuple[int | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


class Term:
    """A summand that is not a tensor yet: the op named `combined_by` combines all of its terms for
    a tensor into one.
    """

    combined_by: ClassVar[str] = ""


Gradient = int | Later | Term | None
"""An op's contribution to the gradient of one of its inputs; None if there is none."""


class Tape(Protocol):
    """The backward graph as gradient rules see it. Tensors are ids. Methods append at once unless
    they say otherwise.
    """

    def use(self, tensor: int) -> int:
        """A tensor of the forward graph for use in the backward graph; this makes it a saved tensor."""

    def op(self, name: str, inputs: Sequence[int | None], **attrs: Any) -> list[int]:
        """Append an op; returns the ids of its outputs."""

    def later(self, name: str, inputs: Sequence[int | None], **attrs: Any) -> Later:
        """A contribution whose op is appended when the sum is needed; for results that nothing else
        waits for.
        """

    def contribute(self, tensor: int, contribution: Gradient) -> None:
        """Add a contribution to another tensor of the forward graph; for `Op.combine`, whose result
        belongs to one tensor.
        """

    def add(self, a: int, b: int) -> int:
        """`a + b`."""

    def multiply(self, a: int, b: int) -> int:
        """`a * b`."""

    def scale(self, x: int, factor: float) -> int:
        """`factor * x`."""

    def matmul(self, a: int, b: int, transpose_a: bool, transpose_b: bool) -> int:
        """`a @ b`, with either operand transposed."""


AnyTerm = TypeVar("AnyTerm", bound=Term)


def terms_of(kind: type[AnyTerm], terms: Sequence[Term]) -> list[AnyTerm]:
    """The terms, after checking that all have this type.

    Raises:
        InternalError: a term that names the same op has another type.
    """
    matching = [t for t in terms if isinstance(t, kind)]
    if len(matching) != len(terms):
        other = next(t for t in terms if not isinstance(t, kind))
        raise InternalError(
            f"[ir.tape] all terms of {kind.combined_by!r} must be of one class; got {type(other).__name__} next to "
            f"{kind.__name__}; correct `combined_by`"
        )
    return matching
