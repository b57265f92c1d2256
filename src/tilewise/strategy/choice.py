"""`Choice`: a layout for one dim, how strongly it is wanted, and why. Propagation compares choices.

Different dims of a tensor must have different axes. If a step has several microbatches, the axes of
a dim that counts the batch include `MICRO`, which stands for time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewise.core.dims import DimLabel
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import MICRO, Axes, DeviceMesh
from tilewise.core.tree import allowed_widths
from tilewise.ir.batch import BatchCut
from tilewise.ir.layout import TensorLayout, show_layout

__all__ = [
    "ASKED",
    "CONTRACTED",
    "FREE",
    "PASSED",
    "RULED",
    "Choice",
    "Choices",
    "as_layout",
    "place_time",
    "require_unique",
]

# Ranks in order of precedence: users' hints, a strategy's rules, layouts that pass through ops, results of
# contractions. A free dim is whole, and takes the layout of its neighbours.
ASKED, RULED, PASSED, CONTRACTED, FREE = range(5)


@dataclass(frozen=True)
class Choice:
    """A choice for one dim.

    The fields are the axes, the rank (how strongly the choice is wanted), the origin in words, and
    whether the choice comes from a hint, directly or through ops.
    """

    axes: Axes
    rank: int
    origin: str
    is_asked: bool = False

    def through(self, rank: int) -> Choice:
        """The choice after it has passed through an op: its rank is at most `rank`."""
        return self if self.rank == FREE else replace(self, rank=max(self.rank, rank))


Choices = tuple[Choice, ...]


def as_layout(choices: Sequence[Choice]) -> TensorLayout:
    """The layout that consists of these choices."""
    return tuple(choice.axes for choice in choices)


def require_unique(name: str, layout: TensorLayout) -> TensorLayout:
    """Reject a layout that uses an axis twice.

    Raises:
        LayoutError: an axis appears twice.
    """
    used = [axis for axes in layout for axis in axes]
    if len(set(used)) != len(used):
        raise LayoutError(
            f"[strategy.propagate] an axis may shard only one dim of a tensor; got {show_layout(layout)} of {name!r}; "
            "label its dims differently"
        )
    return layout


def place_time(
    label: DimLabel | None, axes: Axes, mesh: DeviceMesh, batch: BatchCut, inside: Axes = ()
) -> Axes:
    """The axes of a dim that have more than one device. If the dim counts the batch, `MICRO` is
    added at the right place.

    Sums over devices along an axis before `MICRO` are completed once per step. An axis is placed
    there if each of its devices then has a node of the tree over batch splits. The devices along
    the other axes share every microbatch, and their sums are completed once per microbatch (inside
    of time). If a strategy asks for one axis inside of time, all axes are placed there.
    """
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if label is None or not label.is_summed_by_batch_splits or batch.microbatches == 1:
        return axes
    most = 0 if {*axes} & {*inside} else len(axes)
    outside = max(n for n in range(most + 1) if mesh.size(*axes[:n]) in allowed_widths(batch.batch_splits))
    return (*axes[:outside], MICRO, *axes[outside:])
