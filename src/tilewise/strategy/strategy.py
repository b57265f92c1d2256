"""Strategies as users declare them: which mesh axis shards the dims with which labels."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilewise.core.dims import BATCH, MAX_SIZE
from tilewise.core.errors import LayoutError
from tilewise.core.frozen import FrozenMap
from tilewise.core.mesh import MAX_DEVICES, Axes, DeviceMesh
from tilewise.core.validation import Validator, shown
from tilewise.ir.hints import Hint, as_frozen_hint
from tilewise.strategy.layout_string import parse_layout
from tilewise.strategy.schedules import SCHEDULES, SPLITTING, parse_actions, require_chunks

__all__ = ["DistributionStrategy", "ParallelismMode", "PipelineStages", "StateSharding"]

_validate = Validator("strategy", LayoutError)
_DATA: Mapping[str, str | Axes] = {BATCH.name: "dp"}
_SHARDED_DATA: Mapping[str, str | Axes] = {BATCH.name: ("dp", "fsdp")}
_SHARDING = ("fsdp",)
_MAX_PREFETCH = 64  # layers
_MAX_CHUNKS, _MAX_LAYERS, _MAX_MICROBATCHES = 64, 1 << 16, 1 << 16
_TENSOR = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}


class ParallelismMode(enum.Enum):
    """The kind of parallelism of a strategy."""

    SINGLE = "single"
    DDP = "ddp"
    TENSOR_PARALLEL = "tensor_parallel"
    HYBRID = "hybrid"
    FSDP = "fsdp"
    PIPELINE = "pipeline"


@dataclass(frozen=True)
class StateSharding:
    """How weights, gradients and optimizer states are sharded over the devices that share the
    batch.

    Attributes:
        axes: mesh axes that shard these tensors in storage, along dim 0.
        reshard_after_forward: whether the gathered weights of a layer are freed after its forward
            pass and gathered again for its backward pass. If true, each layer is transferred once
            more, and memory for the weights of two layers suffices, instead of all layers.
        prefetch: how many layers in advance weights are gathered. Each such layer needs memory for
            its gathered weights.
        reduce: when gradients are summed over devices if there are several microbatches.
            `microbatch`: in each microbatch, so that a device stores only its share of the sums.
            `step`: once after the last microbatch, like PyTorch's `no_sync`. Then less is
            transferred, but every device stores sums as large as the weights.
        units: patterns of weight names (`layers.[0-3].*`). Adjacent layers whose weights all match
            one pattern are gathered together, as a unit. Every other layer is a unit of its own, or
            is joined to others by `unit_elements`.
        unit_elements: adjacent layers are gathered together until they have this many elements.

    Raises:
        LayoutError: a value is out of range.
    """

    axes: Axes
    reshard_after_forward: bool = True
    prefetch: int = 1
    reduce: Literal["microbatch", "step"] = "microbatch"
    units: tuple[str, ...] = ()
    unit_elements: int = 0

    def __post_init__(self) -> None:
        axes = tuple(_validate.sequence("sharding", "axes", self.axes, "names"))
        if not axes or not all(isinstance(a, str) for a in axes) or len({*axes}) != len(axes):
            _validate.invalid("sharding", "axes must be unique names", shown(self.axes), 'pass ("fsdp",)')
        object.__setattr__(self, "axes", axes)
        _validate.truth("sharding", "reshard_after_forward", self.reshard_after_forward)
        prefetch = _validate.integer("sharding", "prefetch", self.prefetch, 0, _MAX_PREFETCH)
        object.__setattr__(self, "prefetch", prefetch)
        _validate.choice("sharding", "reduce", self.reduce, ("microbatch", "step"))
        units = tuple(_validate.sequence("sharding", "units", self.units, "patterns of names"))
        for pattern in units:
            _validate.text("sharding", "a pattern of names", pattern)
        object.__setattr__(self, "units", units)
        elements = _validate.integer("sharding", "unit_elements", self.unit_elements, 0, MAX_SIZE)
        object.__setattr__(self, "unit_elements", elements)


@dataclass(frozen=True)
class PipelineStages:
    """How the layers of a model are divided into stages, each on other devices, and in which order
    these process the microbatches.

    Attributes:
        axis: the mesh axis of the stages.
        schedule: `1f1b`, `gpipe`, `interleaved` or `zero_bubble`, which docs/sharding.md compares; or
            the passes of each stage in order, as `read_actions` reads them from a file.
        chunks: runs of layers per stage; more than one with `interleaved` only. A stage then has
            several virtual stages. None: 2 with `interleaved`, otherwise 1, or as the passes say.
        layers: the number of layers of each virtual stage; or all as Megatron's layout, such as
            `Et*3|(tt|)*4,tL`; None: by cost, so that the most expensive stage costs as little as
            possible. What comes before the first layer belongs to the first virtual stage, what
            follows the last layer to the last.
        first_stage_less_layers, last_stage_less_layers: instead of `layers`: how many layers fewer
            than the others the first and the last virtual stage have.
        microbatches: microbatches per step, if a plan states no other number; None: as many as
            there are stages, or the next number that the batch splits allow; or as the passes say.

    Raises:
        LayoutError: a value is out of range.
    """

    axis: str = "pp"
    schedule: str | tuple[tuple[str, ...], ...] = "1f1b"
    chunks: int | None = None
    layers: tuple[int, ...] | str | None = None
    first_stage_less_layers: int | None = None
    last_stage_less_layers: int | None = None
    microbatches: int | None = None

    def __post_init__(self) -> None:
        _validate.text("stages", "the axis of stages", self.axis)
        if self.chunks is not None:
            chunks = _validate.integer("stages", "chunks", self.chunks, 1, _MAX_CHUNKS)
            object.__setattr__(self, "chunks", chunks)
        if isinstance(self.schedule, str):
            _validate.choice("stages", "schedule", self.schedule, tuple(SCHEDULES))
            if self.chunks is None:
                object.__setattr__(self, "chunks", 2 if self.schedule == "interleaved" else 1)
            require_chunks(self.schedule, self.num_chunks)
        else:
            self._take_passes()
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", parse_layout(self.layers))
        elif self.layers is not None:
            layers = _validate.sequence("stages", "layers", self.layers, "numbers")
            numbers = (_validate.integer("stages", "a number of layers", n, 0, _MAX_LAYERS) for n in layers)
            object.__setattr__(self, "layers", tuple(numbers))
        for name in ("first_stage_less_layers", "last_stage_less_layers"):
            less = getattr(self, name)
            if less is not None:
                object.__setattr__(self, name, _validate.integer("stages", name, less, 0, _MAX_LAYERS))
                if self.layers is not None:
                    _validate.invalid(
                        "stages", f"{name} needs layers to be left out", f"{self.layers}", "choose one"
                    )
        if self.microbatches is not None:
            number = _validate.integer("stages", "microbatches", self.microbatches, 1, _MAX_MICROBATCHES)
            object.__setattr__(self, "microbatches", number)

    def _take_passes(self) -> None:
        """Take chunks and microbatches from the passes of each stage."""
        rows = _validate.sequence("stages", "schedule", self.schedule, "rows of passes")
        cells = tuple(tuple(_validate.sequence("stages", "a row", row, "passes")) for row in rows)
        actions = [action for row in parse_actions(cells) for action in row]
        object.__setattr__(self, "schedule", cells)
        chunks = max((a.stage for a in actions), default=0) // len(cells) + 1
        if self.chunks not in (None, chunks):
            _validate.invalid(
                "stages", "chunks follow from the passes", f"{self.chunks}", f"leave it out: {chunks}"
            )
        object.__setattr__(self, "chunks", chunks)
        if self.microbatches is None:
            object.__setattr__(self, "microbatches", max((a.microbatch for a in actions), default=0) + 1)

    @property
    def num_chunks(self) -> int:
        """Runs of layers per stage."""
        assert self.chunks is not None  # since it was checked
        return self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass runs in two parts."""
        if isinstance(self.schedule, str):
            return self.schedule in SPLITTING
        return any("I" in cell or "W" in cell for row in self.schedule for cell in row)


@dataclass(frozen=True)
class DistributionStrategy:
    """How a model is distributed over devices.

    Attributes:
        mode: the kind of parallelism.
        axes: mesh axis -> size, in mesh order.
        rules: label name -> the mesh axis that shards dims with this label, or several axes, major
            first. Other dims are replicated.
        layouts: name pattern (`layers.*.mlp.up_proj.weight`) -> layout (ir/hints.py) of the inputs,
            parameters, states and outputs with matching names. It takes precedence over rules. The
            first matching pattern decides; a pattern that matches no name is an error when
            planning.
        sharding: how weights, gradients and optimizer states are sharded over the devices that
            share the batch; None if each device has them whole.
        stages: how layers are divided into the stages of a pipeline; None if every device has all
            layers.

    The graph decides which sizes are possible: its `k_splits`, and the batch splits of its batch
    (docs/numerics.md, rules 2 and 5).

    Raises:
        LayoutError: an axis has no valid size, or a rule or a layout names an unknown axis or one
            axis twice.
    """

    mode: ParallelismMode
    axes: Mapping[str, int]
    rules: Mapping[str, str | Axes] = field(default_factory=dict)
    layouts: Mapping[str, Hint] = field(default_factory=dict)
    sharding: StateSharding | None = None
    stages: PipelineStages | None = None

    def __post_init__(self) -> None:
        _validate.instance(
            "strategy", "mode", self.mode, ParallelismMode, "pass ParallelismMode.HYBRID, for example"
        )
        mesh = DeviceMesh(self.axes)
        rules = {label: _axes_of(label, pattern_axes, mesh) for label, pattern_axes in self.rules.items()}
        layouts = {}
        for pattern, pattern_axes in self.layouts.items():
            _validate.text("strategy", "a pattern of names", pattern)
            layouts[pattern], axes = as_frozen_hint("strategy", pattern_axes, pattern)
            unknown = sorted(axes - {*mesh.names})
            if unknown:
                _validate.invalid(
                    "strategy",
                    "a layout must name axes of the strategy",
                    f"{unknown[0]!r} for {pattern!r} over {mesh}",
                    "name its axes",
                )
        # copies, because the caller may change its own
        object.__setattr__(self, "axes", FrozenMap(zip(mesh.names, mesh.sizes)))
        object.__setattr__(self, "rules", FrozenMap(rules))
        object.__setattr__(self, "layouts", FrozenMap(layouts))
        self._check_sharding(mesh)
        self._check_stages(mesh)

    def _check_stages(self, mesh: DeviceMesh) -> None:
        """The axis of stages shards no tensor."""
        if self.stages is None:
            return
        axis = self.stages.axis
        labels = [label for label, axes in self.rules.items() if axis in axes]
        hinted = [
            name for name, hint in self.layouts.items() if axis in as_frozen_hint("strategy", hint, name)[1]
        ]
        labels += hinted
        if axis not in mesh.names or labels:
            _validate.invalid(
                "strategy",
                "stages must have an axis of the mesh that shards nothing",
                f"{axis!r} over {mesh}, which shards {', '.join(labels) or 'nothing'}",
                "name another axis",
            )

    def _check_sharding(self, mesh: DeviceMesh) -> None:
        """State may be sharded only over devices that share the batch."""
        if self.sharding is None:
            return
        for axis in self.sharding.axes:
            labels = [label for label, axes in self.rules.items() if axis in axes]
            if axis not in mesh.names or labels != [BATCH.name]:
                _validate.invalid(
                    "strategy",
                    "an axis that shards state must shard the batch and nothing else",
                    f"{axis!r} over {mesh}, which shares {', '.join(labels) or 'nothing'}",
                    f"map {BATCH.name!r} to it, alone or with others",
                )
        in_order = tuple(axis for axis in self.axes_for(BATCH.name) if axis in self.sharding.axes)
        if self.sharding.axes != in_order:
            _validate.invalid(
                "strategy",
                "axes must shard state in the order in which they shard the batch",
                ", ".join(self.sharding.axes),
                f"pass {in_order}",
            )

    def axes_for(self, label: str) -> Axes:
        """The axes that shard dims with this label.

        Raises:
            LayoutError: the label is not a name.
        """
        if not isinstance(label, str):
            _validate.invalid("axes_for", "a label must be a name", shown(label), 'pass "mlp", for example')
        return self.rules.get(label, ())  # type: ignore[return-value]  # __post_init__ made them tuples

    @classmethod
    def single(cls) -> DistributionStrategy:
        """The strategy for a single device."""
        return cls(ParallelismMode.SINGLE, {})

    @classmethod
    def ddp(cls, world_size: int) -> DistributionStrategy:
        """Data parallelism: the batch is sharded on `dp`, and parameters are replicated. Gradients
        are reduced tile by tile, as soon as a tile is complete.
        """
        return cls(ParallelismMode.DDP, {"dp": world_size}, _DATA)

    @classmethod
    def tensor_parallel(cls, world_size: int) -> DistributionStrategy:
        """Tensor parallelism on `tp` as in Megatron-LM: column and row weights, vocabulary-parallel
        embedding, head and loss. KV heads are replicated if there are more devices than heads.
        """
        return cls(ParallelismMode.TENSOR_PARALLEL, {"tp": world_size}, _TENSOR)

    @classmethod
    def fsdp(
        cls,
        world_size: int,
        shard_degree: int | None = None,
        *,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        reduce: Literal["microbatch", "step"] = "microbatch",
        units: Sequence[str] = (),
        unit_elements: int = 0,
    ) -> DistributionStrategy:
        """Fully sharded data parallelism. All devices share the batch. Weights, gradients and
        optimizer states are sharded over `shard_degree` devices. By default these are all devices
        (ZeRO 3). Otherwise each group of `shard_degree` devices has a copy (hybrid sharding).

        Args:
            world_size: number of devices.
            shard_degree: number of devices of a group; must divide `world_size`.
            reshard_after_forward: as in `StateSharding`.
            prefetch: as in `StateSharding`.
            reduce: as in `StateSharding`.
            units: as in `StateSharding`.
            unit_elements: as in `StateSharding`.

        Raises:
            LayoutError: groups would have different sizes, or a setting is out of range.
        """
        world = _validate.integer("fsdp", "world_size", world_size, 1, MAX_DEVICES)
        degree = world if shard_degree is None else shard_degree
        degree = _validate.integer("fsdp", "shard_degree", degree, 1, world)
        if world % degree:
            _validate.invalid(
                "fsdp",
                "shard_degree must divide world_size",
                f"{degree} of {world}",
                "choose one of " + ", ".join(str(n) for n in range(1, world + 1) if world % n == 0),
            )
        sharding = StateSharding(
            _SHARDING,
            reshard_after_forward,
            prefetch,
            reduce,
            units,  # type: ignore[arg-type]  # StateSharding makes it a tuple
            unit_elements,
        )
        axes = {"dp": world // degree, "fsdp": degree}
        return cls(ParallelismMode.FSDP, axes, _SHARDED_DATA, sharding=sharding)

    @classmethod
    def shard_gradients(cls, world_size: int) -> DistributionStrategy:
        """ZeRO 2: gradients and optimizer states are sharded over all devices. Weights are gathered
        once for both passes.
        """
        return cls.fsdp(world_size, reshard_after_forward=False)

    @classmethod
    def shard_optimizer_states(cls, world_size: int) -> DistributionStrategy:
        """ZeRO 1: optimizer states are sharded over all devices. This is `shard_gradients`, except
        that gradients are summed once per step.
        """
        return cls.fsdp(world_size, reshard_after_forward=False, reduce="step")

    @classmethod
    def pipeline(
        cls,
        stages: int,
        microbatches: int | None = None,
        schedule: str | Sequence[Sequence[str]] = "1f1b",
        chunks: int | None = None,
        layers: Sequence[int] | str | None = None,
    ) -> DistributionStrategy:
        """Pipeline parallelism on `pp`: each device has a run of the layers, with their weights,
        gradients and optimizer states.

        Args:
            stages: number of devices.
            microbatches: as in `PipelineStages`.
            schedule: as in `PipelineStages`.
            chunks: as in `PipelineStages`.
            layers: as in `PipelineStages`.
        """
        own = PipelineStages(
            schedule=schedule,  # type: ignore[arg-type]  # PipelineStages makes tuples of sequences
            chunks=chunks,
            layers=layers,  # type: ignore[arg-type]
            microbatches=microbatches,
        )
        return cls(ParallelismMode.PIPELINE, {"pp": stages}, stages=own)

    @classmethod
    def hybrid(
        cls,
        *,
        pp: int = 1,
        dp: int = 1,
        fsdp: int = 1,
        tp: int = 1,
        sharding: StateSharding | None = None,
        stages: PipelineStages | None = None,
    ) -> DistributionStrategy:
        """The product of pipeline, data parallelism, sharded state and tensor parallelism, on a mesh
        of these axes. Stages are outermost: they exchange least.

        Args:
            pp: stages of the pipeline.
            dp: devices that share the batch and have the whole state.
            fsdp: devices that share the batch and the state.
            tp: devices that share heads, channels and vocabulary.
            sharding: how state is sharded; by default as in `StateSharding`.
            stages: how layers are divided; by default as in `PipelineStages`.
        """
        axes = {"dp": dp, "fsdp": fsdp, "tp": tp}
        if sharding is None and _validate.integer("hybrid", "fsdp", fsdp, 1, MAX_DEVICES) == 1:
            del axes["fsdp"]
        elif sharding is None:
            sharding = StateSharding(_SHARDING)
        if stages is not None or _validate.integer("hybrid", "pp", pp, 1, MAX_DEVICES) > 1:
            stages = PipelineStages() if stages is None else stages
            axes = {stages.axis: pp, **axes}
        data = _DATA if sharding is None else _SHARDED_DATA
        return cls(ParallelismMode.HYBRID, axes, {**data, **_TENSOR}, sharding=sharding, stages=stages)

    @classmethod
    def for_mesh(
        cls,
        mesh: DeviceMesh,
        sharding: StateSharding | None = None,
        stages: PipelineStages | None = None,
    ) -> DistributionStrategy:
        """The strategy that the names of a mesh's axes stand for.

        Args:
            mesh: a mesh with some or all of the axes `pp`, `dp`, `fsdp` and `tp`.
            sharding: how state is sharded over an axis `fsdp`; by default as in `StateSharding`.
            stages: how layers are divided along an axis `pp`; by default as in `PipelineStages`.

        Raises:
            LayoutError: an axis has another name.
        """
        names = ("pp", "dp", "fsdp", "tp")
        unknown = [n for n in mesh.names if n not in names]
        if unknown:
            raise LayoutError(
                f"[strategy.for_mesh] mesh axes are pp, dp, fsdp and tp; got {', '.join(unknown)}; rename or drop them"
            )
        pp, dp, fsdp, tp = (mesh.size(name) for name in names)
        sharding, stages = sharding if fsdp > 1 else None, stages if pp > 1 else None
        return cls.hybrid(pp=pp, dp=dp, fsdp=fsdp, tp=tp, sharding=sharding, stages=stages)

    def mesh(self) -> DeviceMesh:
        """The mesh with the axes of this strategy."""
        return DeviceMesh(self.axes)


def _axes_of(label: object, rule: object, mesh: DeviceMesh) -> Axes:
    """A rule's axes as a tuple."""
    axes = (rule,) if isinstance(rule, str) else rule if isinstance(rule, tuple) else (None,)
    if not all(isinstance(a, str) and a in mesh.names for a in axes) or len(set(axes)) != len(axes):
        _validate.invalid(
            "strategy",
            "a rule must map a label to an axis of the strategy, or to a tuple of several",
            f"{label!r} to {shown(rule)} over {mesh}",
            "name its axes, each once",
        )
    return tuple(str(axis) for axis in axes)
