"""`Tape`, to which a gradient rule appends the ops of the backward pass, and the contributions that
a gradient rule may return.

A contribution is a summand of a tensor's gradient. It is a tensor's id, or an op that is added only
when the sum is formed (`Later`), or a `Term` that one op combines with other terms. The gradient of
a tensor is always summed in one order:

1. ids and `Later`s, in reverse order of use: the contribution of the last user comes first;
2. terms, op by op (`Op.combine`): by ascending `combine_rank`, then by the names of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from tilewise.core.errors import InternalError

if TYPE_CHECKING:
    from tilewise.ir.graph import TensorSpec
    from tilewise.ir.op import Op

__all__ = ["WEIGHT_PART", "Gradient", "Later", "Tape", "Term", "terms_of"]

WEIGHT_PART = ".weights"  # ends the label of a call that computes only gradients of weights


@dataclass(frozen=True)
class Later:
    """A contribution whose op has not been added yet: the op is added when the gradient is needed,
    after ops that are needed sooner. The op has one output, which is the contribution.
    """

    op: Op


class Term:
    """A summand that is not a tensor yet: the op named `combined_by` combines all of its terms for
    a tensor into one.
    """

    combined_by: ClassVar[str] = ""


Gradient = int | Later | Term | None
"""An op's contribution to the gradient of one of its inputs; None if it has no gradient."""


class Tape(Protocol):
    """The backward graph as gradient rules see it. Tensors are ids. Methods append at once unless
    they say otherwise.
    """

    def use(self, tensor: int) -> int:
        """Make a tensor of the forward graph a saved tensor, and return its id in the backward
        graph.
        """

    def op(self, op: Op) -> list[int]:
        """Append an op whose operands are tensors of the backward graph; returns the ids of its
        results.
        """

    def spec(self, tensor: int) -> TensorSpec:
        """The spec of a tensor of the backward graph."""

    def is_needed(self, tensor: int) -> bool:
        """Whether the gradient of a parameter of the forward graph is needed: it is not frozen."""

    def later(self, op: Op) -> Later:
        """Return a contribution whose op is appended when the sum is needed. Use it for results
        that no other op reads.
        """

    def contribute(self, tensor: int, contribution: Gradient) -> None:
        """Add a contribution to the gradient of any tensor of the forward graph. `Op.combine` uses
        it if it computes gradients of more tensors than the one that it returns.
        """

    def add(self, a: int, b: int) -> int:
        """`a + b`."""

    def multiply(self, a: int, b: int) -> int:
        """`a * b`."""

    def scale(self, x: int, factor: float) -> int:
        """`factor * x`."""

    def matmul(self, a: int, b: int, trans_a: bool, trans_b: bool) -> int:
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
