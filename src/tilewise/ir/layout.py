"""Where the parts of every tensor live, as data.

A layout is a tuple with one entry per tensor dim: the mesh axis that shards it, or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.core.mesh import DeviceMesh

__all__ = ["GraphLayout", "TensorLayout"]

TensorLayout = tuple[str | None, ...]


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
