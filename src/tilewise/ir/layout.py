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

# The kinds of leaves of a reduction's tree (docs/numerics.md, rules 2, 5 and 4).
K_SPLITS = "k_splits"  # of a labelled dim: `Graph.k_splits`
BATCH_SPLITS = "batch_splits"  # of the batch: `PlanSettings.batch_splits`
GROUPS = "groups"  # the query heads that share a KV head


@dataclass(frozen=True)
class PendingReduction:
    """A value of which several devices or microbatches each have a part, and how it is completed.

    Attributes:
        op: id of the op that computes the parts.
        partial: name of the partial value (`Factors.partial_values`).
        combine: how parts are combined: `sum`, `max` or `or`.
        outputs: positions of the op's outputs that are computed from the complete value.
        tree: what the tree's leaves are: `K_SPLITS`, `BATCH_SPLITS` or `GROUPS`.
        count: number of leaves.
        axes: the device group's axes, major first, and `MICRO` if microbatches have parts.
        leaf_ranges: per device group that completes a value, the leaves `[begin, end)` of each
            member, in the order of `axes`. One device group has all leaves, except for `GROUPS`,
            where the holders of one KV head are a device group.
        arrives: layouts in which the outputs are delivered: whole on every member (an all-reduce),
            or in shards over the device group's axes (a reduce-scatter).
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
        """The mesh axes of the devices that complete the value together."""
        return in_space(self.axes)

    @property
    def arrives_in_shards(self) -> bool:
        """Whether each member keeps a shard of the complete value. Devices that share a KV head all
        have it whole.
        """
        dims = [axes for layout in self.arrives for axes in layout]
        return self.tree != GROUPS and any(set(self.group) & set(axes) for axes in dims)

    @property
    def is_completed_per_microbatch(self) -> bool:
        """Whether axes inside of time share each microbatch, so that parts are combined before the
        next microbatch.
        """
        return MICRO in self.axes[:-1]


@dataclass(frozen=True)
class Reshard:
    """A tensor whose producer and reader need different layouts. `strategy.insert_reshards` turns
    it into ops.

    Attributes:
        op: id of the reader; for a hint on a result, of its producer.
        position: position of the reader's operand; None for a result, which all readers then read
            resharded.
        tensor: its id.
        before, after: its layouts.
        labels: labels of its dims after the reshard, with the cuts that the reader needs.
        origins: the origin of each layout, in words.
        is_asked_for: whether a user's hint asks for it.
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
        storage: layout per tensor id between calls: how parameters, gradients and optimizer states
            are stored and updated, and what checkpoints contain.
        compute: layout per tensor id as ops read and write it. No tensor is partial: an op that
            contracts a sharded dim completes the reduction itself, so other ops never see partial
            values (docs/numerics.md, rule 3).
        calls: layouts of the called templates, by the call's op id.
        pending_reductions: how partial values are completed, by op id and name of the partial
            value. Several of one name belong to several device groups, and are completed one after
            another.
        reshards: tensors whose producers and readers need different layouts; empty once they are
            ops.
        storage_axes: axes that shard weights, gradients and states in storage. They are the last
            axes of dim 0, in whole panels. Readers of such a weight read the result of an op
            `all_gather_parameters`.
        files: tensors in the devices' files. Their readers read the result of an op `fetch`; an
            update works on one block after another.
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
    """A layout as text: `(dp, -, tp)`."""
    return f"({', '.join(show_axes(axes) for axes in layout)})"
