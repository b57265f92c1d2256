"""Declared strategies: which mesh axis shards what a tensor dim counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.core.border import Border, shown
from tilewise.core.dims import is_power_of_two
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh

__all__ = ["DistributionStrategy", "ParallelismMode"]

_border = Border("strategy", LayoutError)
_DATA = {"batch": "dp"}
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
        rules: label name -> mesh axis that shards dims so labelled; everything else is replicated.

    Raises:
        LayoutError: an axis has no size that is a power of two, or a rule names no axis.
    """

    mode: ParallelismMode
    axes: Mapping[str, int]
    rules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _border.instance(
            "strategy", "mode", self.mode, ParallelismMode, "pass ParallelismMode.HYBRID, for example"
        )
        mesh = DeviceMesh(self.axes)
        for name, size in zip(mesh.names, mesh.sizes):
            if not is_power_of_two(size):
                _border.refuse(
                    name,
                    "the number of devices must be a power of two, so that sums keep one tree",
                    f"{name}={size}",
                    "choose 1, 2, 4 or 8",
                )
        for label, axis in _border.mapping("strategy", "rules", self.rules, "axes").items():
            if not isinstance(axis, str) or axis not in mesh.names:
                _border.refuse(
                    "strategy",
                    "a rule must map a label to an axis of the strategy",
                    f"{label!r} to {shown(axis)} over {mesh}",
                    "name one of its axes",
                )
        object.__setattr__(self, "axes", dict(zip(mesh.names, mesh.sizes)))  # the caller may change its own
        object.__setattr__(self, "rules", dict(self.rules))

    @classmethod
    def single(cls) -> DistributionStrategy:
        """One device."""
        return cls(ParallelismMode.SINGLE, {})

    @classmethod
    def ddp(cls, world_size: int) -> DistributionStrategy:
        """Batch sharded on `dp`, parameters replicated, gradient tiles reduced as they appear.

        Raises:
            LayoutError: `world_size` is no power of two.
        """
        return cls(ParallelismMode.DDP, {"dp": world_size}, _DATA)

    @classmethod
    def tensor_parallel(cls, world_size: int) -> DistributionStrategy:
        """Megatron's plan on `tp`: column and row weights, vocabulary-parallel embedding, head and loss; KV heads
        replicated when there are more devices than heads.

        Raises:
            LayoutError: `world_size` is no power of two.
        """
        return cls(ParallelismMode.TENSOR_PARALLEL, {"tp": world_size}, _TENSOR)

    @classmethod
    def hybrid(cls, *, dp: int = 1, tp: int = 1) -> DistributionStrategy:
        """The product of data and tensor parallelism on a two-axis mesh.

        Raises:
            LayoutError: a size is no power of two.
        """
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
