"""Where the parts of every tensor live, as data.

The internal form is a tuple with one entry per tensor dim: the mesh axis that shards it, or None. `Shard`,
`Replicate` and `Partial` are the per-axis spelling of `torch.distributed.tensor`, accepted from users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.core.mesh import DeviceMesh

__all__ = ["GraphLayout", "Partial", "Replicate", "Shard", "TensorLayout"]

TensorLayout = tuple[str | None, ...]


@dataclass(frozen=True)
class Shard:
    """This axis cuts tensor dim `dim`."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every device on this axis holds the whole."""


@dataclass(frozen=True)
class Partial:
    """Every device on this axis holds a summand (`sum`), a candidate (`max`) or nothing but its own rows (`select`)."""

    reduce: str = "sum"


@dataclass(frozen=True)
class GraphLayout:
    """Layouts of one graph or template on a mesh.

    Attributes:
        tensors: layout per tensor id. No tensor is partial: an op that contracts a sharded dim finishes the reduction
            itself, so partial values never meet another op (docs/numerics.md, rule 3).
        calls: layouts of the templates called, by the call's op id.
    """

    mesh: DeviceMesh
    tensors: tuple[TensorLayout, ...]
    calls: Mapping[int, GraphLayout] = field(default_factory=dict)
