"""Declared strategies: which mesh axis shards what a tensor dim counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.core.border import Border, shown
from tilewise.core.dims import BATCH
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.ir.hints import Hint, axes_in

__all__ = ["DistributionStrategy", "ParallelismMode"]

_border = Border("strategy", LayoutError)
_DATA: Mapping[str, str] = {BATCH.name: "dp"}
_TENSOR = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}


class ParallelismMode(enum.Enum):
    """What a strategy spreads over the devices."""

    SINGLE = "single"
    DDP = "ddp"
    TENSOR_PARALLEL = "tensor_parallel"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class DistributionStrategy:
    """How a model is spread.

    Attributes:
        mode: its kind.
        axes: mesh axis -> size, in mesh order.
        rules: label name -> the mesh axis that shards dims so labelled, or several, major first; everything else is
            replicated.
        layouts: name pattern (`layers.*.mlp.up_proj.weight`) -> layout (ir/hints.py) of the tensors from outside and of
            the outputs so named, which goes before rules. The first pattern that fits decides; planning refuses one
            that fits no name.

    Which sizes fit is the graph's: its `reduction_chunks` and the leaves of its batch decide (docs/numerics.md, rules 2
    and 5).

    Raises:
        LayoutError: an axis has no size, or a rule or a layout names no axis, or one twice.
    """

    mode: ParallelismMode
    axes: Mapping[str, int]
    rules: Mapping[str, str | Axes] = field(default_factory=dict)
    layouts: Mapping[str, Hint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _border.instance(
            "strategy", "mode", self.mode, ParallelismMode, "pass ParallelismMode.HYBRID, for example"
        )
        mesh = DeviceMesh(self.axes)
        rules = {
            label: _axes_of(label, given, mesh)
            for label, given in _border.mapping("strategy", "rules", self.rules, "axes").items()
        }
        object.__setattr__(self, "axes", dict(zip(mesh.names, mesh.sizes)))  # the caller may change its own
        object.__setattr__(self, "rules", rules)
        layouts = dict(_border.mapping("strategy", "layouts", self.layouts, "layouts by name"))
        for pattern, hint in layouts.items():
            _border.text("strategy", "a pattern of names", pattern)
            unknown = sorted(axes_in("strategy", hint, pattern) - {*mesh.names})
            if unknown:
                _border.refuse(
                    "strategy",
                    "a layout names axes of the strategy",
                    f"{unknown[0]!r} for {pattern!r} over {mesh}",
                    "name its axes",
                )
        object.__setattr__(self, "layouts", layouts)

    def axes_for(self, label: str) -> Axes:
        """The axes that shard dims of that label."""
        return self.rules.get(label, ())  # type: ignore[return-value]  # checked and made tuples when it was declared

    @classmethod
    def single(cls) -> DistributionStrategy:
        """One device."""
        return cls(ParallelismMode.SINGLE, {})

    @classmethod
    def ddp(cls, world_size: int) -> DistributionStrategy:
        """Batch sharded on `dp`, parameters replicated, gradient tiles reduced as they appear."""
        return cls(ParallelismMode.DDP, {"dp": world_size}, _DATA)

    @classmethod
    def tensor_parallel(cls, world_size: int) -> DistributionStrategy:
        """Megatron's plan on `tp`: column and row weights, vocabulary-parallel embedding, head and loss; KV heads
        replicated when there are more devices than heads."""
        return cls(ParallelismMode.TENSOR_PARALLEL, {"tp": world_size}, _TENSOR)

    @classmethod
    def hybrid(cls, *, dp: int = 1, tp: int = 1) -> DistributionStrategy:
        """The product of data and tensor parallelism on a two-axis mesh."""
        return cls(ParallelismMode.HYBRID, {"dp": dp, "tp": tp}, {**_DATA, **_TENSOR})

    @classmethod
    def for_mesh(cls, mesh: DeviceMesh) -> DistributionStrategy:
        """The strategy that a mesh's axis names stand for.

        Raises:
            LayoutError: an axis is neither `dp` nor `tp`.
        """
        _border.instance("for_mesh", "a mesh", mesh, DeviceMesh, "pass DeviceMesh({'dp': 2})")
        unknown = [n for n in mesh.names if n not in ("dp", "tp")]
        if unknown:
            raise LayoutError(
                f"[strategy.for_mesh] mesh axes are dp and tp; got {', '.join(unknown)}; rename or drop them"
            )
        return cls.hybrid(dp=mesh.size("dp"), tp=mesh.size("tp"))

    def mesh(self) -> DeviceMesh:
        """The mesh a strategy makes when none is given."""
        return DeviceMesh(self.axes)


def _axes_of(label: object, given: object, mesh: DeviceMesh) -> Axes:
    """A rule's axes as a tuple."""
    axes = (given,) if isinstance(given, str) else given if isinstance(given, tuple) else (None,)
    if not all(isinstance(a, str) and a in mesh.names for a in axes) or len(set(axes)) != len(axes):
        _border.refuse(
            "strategy",
            "a rule must map a label to an axis of the strategy, or to a tuple of several",
            f"{label!r} to {shown(given)} over {mesh}",
            "name its axes, each once",
        )
    return tuple(str(axis) for axis in axes)
