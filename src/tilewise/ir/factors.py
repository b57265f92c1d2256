"""`Factors`: the names of the dims of an op's operands and outputs, and the values of which devices
compute parts. `ir.resolve` derives them from the op's class; strategies read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewise.ir.layout import K_SPLITS

__all__ = ["Factors", "PartialValue"]


@dataclass(frozen=True)
class PartialValue:
    """A value of which each device or microbatch computes only a part if they share one of its
    factors. The op's lowering completes the value.

    Attributes:
        name: name by which the lowering gets the pending reduction of this value
            (`Lowering.pending_reductions`).
        factors: the contracted factors. If one is shared, each device or microbatch has a part of
            the value.
        outputs: positions of the outputs that are computed from the complete value.
        combine: how parts are combined: `sum`, `max`, or `or` (every part but one is zero).
        tree: the tree along which parts are combined: `K_SPLITS` of a labelled dim, `BATCH_SPLITS`
            of the batch, or `GROUPS` of query heads. The role of a dim's label decides between k
            splits and batch splits, never its name.
        cut_by: positions of the operands whose labels determine where the tree cuts. Other operands
            may be sliced to match these. None stands for all operands that have the factors.
    """

    name: str
    factors: tuple[str, ...]
    outputs: tuple[int, ...]
    combine: str = "sum"
    tree: str = K_SPLITS
    cut_by: tuple[int, ...] | None = None

    @cached_property
    def contracts(self) -> frozenset[str]:
        """The factors as a set. An op over all gradients has thousands of factors, so lookup must
        be fast.
        """
        return frozenset(self.factors)


@dataclass(frozen=True)
class Factors:
    """Einsum-style names of the dims of every operand. One declaration serves all meshes.

    If an output does not have a factor of the inputs, the op contracts this factor. If devices
    share a contracted factor, the output is a partial value. `ir.validate` rejects a partial value
    unless the op declares a `PartialValue`, which the op's lowering completes.

    Attributes:
        inputs, outputs: per operand or output, the name of each dim; None for an absent operand.
        whole: factors that cannot be sharded.
        partial_values: values that are partial if one of their factors is shared.
        moved: factors that inputs and outputs may share along different axes, because the op
            changes the layout.
    """

    inputs: tuple[tuple[str, ...] | None, ...]
    outputs: tuple[tuple[str, ...], ...]
    whole: frozenset[str] = frozenset()
    partial_values: tuple[PartialValue, ...] = ()
    moved: frozenset[str] = frozenset()
