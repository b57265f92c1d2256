"""Layouts as data: which mesh axes shard each dim of a tensor.

A layout is a tuple with one entry per dim: the mesh axes that shard the dim, major first, or `()`.
An entry may contain `MICRO`, which means that microbatches divide the dim in time. Axes before
`MICRO` are outside: the parts that a device works on in one step are adjacent, and sums over
devices are completed once per step. Axes after `MICRO` are inside: devices share every microbatch,
and sums are completed once per microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.core.dims import DimLabel
from tilewise.core.frozen import freeze_maps
from tilewise.core.mesh import MICRO, Axes, DeviceMesh
from tilewise.core.tree import Interval

__all__ = [
    "BATCH_SPLITS",
    "GROUPS",
    "K_SPLITS",
    "GraphLayout",
    "PendingReduction",
    "Reshard",
    "TensorLayout",
    "in_space",
    "show_axes",
    "show_layout",
]

TensorLayout = tuple[Axes, ...]

# What the leaves of a reduction's tree are (docs/numerics.md, rules 2, 5 and 4).
K_SPLITS = "k_splits"  # of a labelled dim: `Graph.k_splits`
BATCH_SPLITS = "batch_splits"  # of the batch: `PlanSettings.batch_splits`
GROUPS = "groups"  # the query heads that share a KV head


@dataclass(frozen=True)
class PendingReduction:
    """A value of which several devices, or several microbatches, hold a part each, and what becomes of it.

    Attributes:
        op: id of the op that produces the parts.
        partial: its name for the value (`Factors.partial_values`).
        combine: how parts are combined: `sum`, `max` or `or`.
        outputs: positions of the op's outputs that stand behind the complete value.
        tree: what the tree's leaves are: `K_SPLITS`, `BATCH_SPLITS` or `GROUPS`.
        count: how many.
        axes: the device group's axes, major first, and `MICRO` where microbatches hold parts.
        leaf_ranges: per device group that completes a value of its own, the leaves `[begin, end)` of the tree of each
            member, in the order of `axes`. One device group holds all, except of groups: the
            holders of one KV head are one.
        arrives: layouts in which the outputs must arrive: without the device group's axes on every
            member (an all-reduce), with them in shards (a reduce-scatter).
    """

    op: int
    partial: str
    combine: str
    outputs: tuple[int, ...]
    tree: str
    count: int
    axes: Axes
    leaf_ranges: tuple[tuple[Interval, ...], ...]
    arrives: tuple[TensorLayout, ...]

    @property
    def group(self) -> Axes:
        """The mesh axes of those who complete the value together."""
        return in_space(self.axes)

    @property
    def arrives_in_shards(self) -> bool:
        """Whether members keep a shard each of the complete value. Who shares a KV head has it whole."""
        dims = [axes for layout in self.arrives for axes in layout]
        return self.tree != GROUPS and any(set(self.group) & set(axes) for axes in dims)

    @property
    def is_completed_per_microbatch(self) -> bool:
        """Whether axes inside of time share each microbatch, so that parts are combined before the next one's."""
        return MICRO in self.axes[:-1]


@dataclass(frozen=True)
class Reshard:
    """A disagreement between who makes a tensor and who reads it, until `strategy.insert_reshards` makes it ops.

    Attributes:
        op: id of the reader; for what a hint asks of a result, of its producer.
        position: of the reader's operand; None for a result, which then all readers take resharded.
        tensor: its id.
        before, after: its layouts.
        labels: what its dims count afterwards, as its reader has them cut.
        origins: in words, where each of the layouts came from.
        is_asked_for: a user's hint wants it.
    """

    op: int
    position: int | None
    tensor: int
    before: TensorLayout
    after: TensorLayout
    labels: tuple[DimLabel | None, ...]
    origins: tuple[str, str]
    is_asked_for: bool


@dataclass(frozen=True)
class GraphLayout:
    """Layouts of one graph or template on a mesh.

    Attributes:
        storage: layout per tensor id between calls: where parameters, gradients and optimizer states
            live, where they are updated, what checkpoints see.
        compute: layout per tensor id as ops read and write it. No tensor is partial: an op that
            contracts a sharded dim finishes the reduction itself, so partial values never meet
            another op (docs/numerics.md, rule 3).
        calls: layouts of the templates called, by the call's op id.
        pending_reductions: what becomes of partial values, by op id and the partial value's name.
            Several pending reductions of one name are of several device groups, completed one after
            the other.
        reshards: what producers and readers do not agree on; none once they are ops.
        storage_axes: axes that cut weights, gradients and states as stored, the last ones of dim 0,
            in whole panels. What reads a weight there reads what an op `all_gather_parameters` has gathered.
        files: tensors that lie in the devices' files. What reads one reads what an op `fetch` has brought; an update
            works on a block after the other.
    """

    mesh: DeviceMesh
    storage: tuple[TensorLayout, ...]
    compute: tuple[TensorLayout, ...]
    calls: Mapping[int, GraphLayout] = field(default_factory=dict)
    pending_reductions: Mapping[tuple[int, str], tuple[PendingReduction, ...]] = field(default_factory=dict)
    reshards: tuple[Reshard, ...] = ()
    storage_axes: Axes = ()
    files: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        freeze_maps(self, "calls", "pending_reductions")


def in_space(axes: Axes) -> Axes:
    """The mesh axes among some axes: all but time."""
    return tuple(axis for axis in axes if axis != MICRO)


def show_axes(axes: Axes) -> str:
    """`-` for none, an axis by its name, several joined by `*`, major first."""
    return "*".join(axes) or "-"


def show_layout(layout: TensorLayout) -> str:
    """A layout in words: `(dp, -, tp)`."""
    return f"({', '.join(show_axes(axes) for axes in layout)})"
