"""`Choice`: a layout for one dim, how strongly it is wanted, and why. Propagation compares choices.

Different dims of a tensor must have different axes. A dim that counts the batch includes the time
axis if a step has several microbatches.
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

# Who is heard first: users' hints, a strategy's rules, what passes through an op, what comes out of a contraction. A
# dim that is free is whole, and takes what its neighbours have.
ASKED, RULED, PASSED, CONTRACTED, FREE = range(5)


@dataclass(frozen=True)
class Choice:
    """One dim's axes, the rank of who chose them, in words where they came from, and whether a hint is behind them,
    through however many ops."""

    axes: Axes
    rank: int
    origin: str
    is_asked: bool = False

    def through(self, rank: int) -> Choice:
        """The same behind an op: no stronger than what passes through it."""
        return self if self.rank == FREE else replace(self, rank=max(self.rank, rank))


Choices = tuple[Choice, ...]


def as_layout(choices: Sequence[Choice]) -> TensorLayout:
    """The layout that choices make up."""
    return tuple(choice.axes for choice in choices)


def require_unique(name: str, layout: TensorLayout) -> TensorLayout:
    """A layout in which no axis stands twice.

    Raises:
        LayoutError: one does.
    """
    used = [axis for axes in layout for axis in axes]
    if len(set(used)) != len(used):
        raise LayoutError(
            f"[strategy.propagate] an axis can shard one dim of a tensor; got {show_layout(layout)} of {name!r}; "
            "label its dims differently"
        )
    return layout


def place_time(
    label: DimLabel | None, axes: Axes, mesh: DeviceMesh, batch: BatchCut, inside: Axes = ()
) -> Axes:
    """A dim's axes that have a device to share with and, where it counts the batch, microbatches among them.

    Outside of time, so that sums are completed once per step, are as many axes as hold nodes of the
    tree over batch splits: those whose devices the batch splits allow. The others share every
    microbatch, and sums are completed once in each. Where one is wanted inside, all are.
    """
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if label is None or not label.is_summed_by_batch_splits or batch.microbatches == 1:
        return axes
    most = 0 if {*axes} & {*inside} else len(axes)
    outside = max(n for n in range(most + 1) if mesh.size(*axes[:n]) in allowed_widths(batch.batch_splits))
    return (*axes[:outside], MICRO, *axes[outside:])
