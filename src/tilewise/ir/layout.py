"""Layouts as data: which mesh axes shard each dim of a tensor.

A layout is a tuple with one entry per dim: the mesh axes that shard the dim, major first, or `()`.
An entry may contain `MICRO`, which means that microbatches divide the dim in time. Axes before
`MICRO` are outside of time: the parts that a device works on in one step are adjacent, and sums
over devices are completed once per step. Axes after `MICRO` are inside of time: devices share every
microbatch, and sums over devices are completed once per microbatch.

A partial value is a value of which several devices or microbatches each have a part. A pending
reduction says how the parts are combined along a tree; each part is an interval of the tree's
leaves. A device group is the devices along some mesh axes that complete such a value together.
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
    "EVERY_STAGE",
    "GROUPS",
    "K_SPLITS",
    "GraphLayout",
    "PendingReduction",
    "Reshard",
    "StageLayout",
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

EVERY_STAGE = -1  # of an op that the devices of all stages of a pipeline run together


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
        leaf_ranges: for each device group that completes a value, the leaves `[begin, end)` of each
            member, in the order of `axes`. There is one device group with all leaves, except for
            `GROUPS`, where the devices that have one KV head are a device group.
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
        """Whether each member keeps only a shard of the complete value. False for devices that
        share a KV head: each has the whole value.
        """
        dims = [axes for layout in self.arrives for axes in layout]
        return self.tree != GROUPS and any(set(self.group) & set(axes) for axes in dims)

    @property
    def is_completed_per_microbatch(self) -> bool:
        """Whether the devices share each microbatch (axes inside of time), so that their parts are
        combined before the next microbatch.
        """
        return MICRO in self.axes[:-1]


@dataclass(frozen=True)
class Reshard:
    """A tensor whose producer and reader need different layouts. `strategy.insert_reshards` turns
    it into ops.

    Attributes:
        op: id of the op that reads the tensor. If a hint on a result asks for the reshard, id of
            the op that computes the result.
        position: position of the reader's operand. None for a result: then all readers read the
            resharded tensor.
        tensor: id of the tensor.
        before, after: the layouts of the tensor before and after the reshard.
        labels: labels of the tensor's dims after the reshard, with the cuts that the reader needs.
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
class StageLayout:
    """Which stage of a pipeline runs each op of a graph, and which stages have each tensor in memory.

    The layers of a model are divided into virtual stages, in order. Of p stages, stage s runs the
    virtual stages s, s + p, s + 2p, and so on: one, or with an interleaved schedule several.

    Attributes:
        axis: the mesh axis of the pipeline. A device's stage is its coordinate on this axis.
        ops: the virtual stage of each op, or `EVERY_STAGE`. Of an op `move`, the one that receives.
        tensors: per tensor, the stages that have it, in order.
        weight_part: per op, whether it is one of the backward pass that only leads to gradients of
            weights; empty if no schedule runs these apart from the others.
    """

    axis: str
    ops: tuple[int, ...]
    tensors: tuple[tuple[int, ...], ...]
    weight_part: tuple[bool, ...] = ()

    def is_weight_part(self, op: int) -> bool:
        """Whether a schedule may run an op after the gradients that other stages wait for."""
        return bool(self.weight_part) and self.weight_part[op]


@dataclass(frozen=True)
class GraphLayout:
    """Layouts of one graph or template on a mesh.

    Attributes:
        storage: per tensor id, the layout between calls: the one in which parameters, gradients and
            optimizer states are stored, updated and written to checkpoints.
        compute: per tensor id, the layout in which ops read and write the tensor. No tensor is
            partial: an op that contracts a sharded dim completes the reduction itself, so other ops
            never see partial values (docs/numerics.md, rule 3).
        calls: layouts of the called templates, by the call's op id.
        pending_reductions: how partial values are completed, by op id and name of the partial
            value. Several pending reductions with one name belong to different device groups, and
            are completed one after another.
        reshards: tensors whose producers and readers need different layouts. Empty once
            `insert_reshards` has made ops of them.
        storage_axes: axes that shard weights, gradients and states in storage. They are the last
            axes of dim 0, in whole panels. Readers of such a weight read the result of an op
            `all_gather_parameters`.
        files: tensors that are stored in files of the devices. Their readers read the result of an
            op `fetch`. An update reads and writes such a tensor block by block.
        stages: the stages of a pipeline; None if every device runs all ops.
    """

    mesh: DeviceMesh
    storage: tuple[TensorLayout, ...]
    compute: tuple[TensorLayout, ...]
    calls: Mapping[int, GraphLayout] = field(default_factory=dict)
    pending_reductions: Mapping[tuple[int, str], tuple[PendingReduction, ...]] = field(default_factory=dict)
    reshards: tuple[Reshard, ...] = ()
    storage_axes: Axes = ()
    files: tuple[int, ...] = ()
    stages: StageLayout | None = None

    def __post_init__(self) -> None:
        freeze_maps(self, "calls", "pending_reductions")

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; 1 without a pipeline."""
        return 1 if self.stages is None else self.mesh.size(self.stages.axis)

    def stages_of(self, tensor: int) -> tuple[int, ...]:
        """The stages that have a tensor of the root graph."""
        return (0,) if self.stages is None else self.stages.tensors[tensor]

    def stage_of(self, device: int) -> int:
        """The stage of a device."""
        return 0 if self.stages is None else self.mesh.coordinate(device, self.stages.axis)


def in_space(axes: Axes) -> Axes:
    """The axes without `MICRO`, which stands for time."""
    return tuple(axis for axis in axes if axis != MICRO)


def show_axes(axes: Axes) -> str:
    """Axes as text: their names joined by `*`, major first; `-` for no axis."""
    return "*".join(axes) or "-"


def show_layout(layout: TensorLayout) -> str:
    """A layout as text: `(dp, -, tp)`."""
    return f"({', '.join(show_axes(axes) for axes in layout)})"
