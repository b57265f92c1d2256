"""Where the parts of every tensor live, as data.

A layout is a tuple with one entry per tensor dim: the mesh axes that shard it, major first, `()` where none does. Where
`MICRO` stands among them, microbatches cut the dim in time, and the tuple is the order of the parts: axes before it are
outside (a device's parts of a step follow each other; sums are completed over devices once per step), axes behind it
inside (devices share every microbatch; sums are completed per microbatch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.core.mesh import MICRO, Axes, DeviceMesh

__all__ = ["GraphLayout", "TensorLayout", "in_space", "show_axes", "show_layout"]

TensorLayout = tuple[Axes, ...]


@dataclass(frozen=True)
class GraphLayout:
    """Layouts of one graph or template on a mesh.

    Attributes:
        home: layout per tensor id between calls: where parameters, gradients and optimizer states live, where they are
            updated, what checkpoints see.
        use: layout per tensor id as ops read and write it. No tensor is partial: an op that contracts a sharded dim
            finishes the reduction itself, so partial values never meet another op (docs/numerics.md, rule 3).
        calls: layouts of the templates called, by the call's op id.
    """

    mesh: DeviceMesh
    home: tuple[TensorLayout, ...]
    use: tuple[TensorLayout, ...]
    calls: Mapping[int, GraphLayout] = field(default_factory=dict)


def in_space(axes: Axes) -> Axes:
    """The mesh axes among some axes: all but time."""
    return tuple(axis for axis in axes if axis != MICRO)


def show_axes(axes: Axes) -> str:
    """`-` for none, an axis by its name, several joined by `*`, major first."""
    return "*".join(axes) or "-"


def show_layout(layout: TensorLayout) -> str:
    """A layout in words: `(dp, -, tp)`."""
    return f"({', '.join(show_axes(axes) for axes in layout)})"
