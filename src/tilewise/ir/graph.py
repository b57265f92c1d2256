"""The graph as data: tensors, operations, templates. It knows no devices and does nothing.

`graph.GraphBuilder` makes it, passes turn one into another, `plan` reads it. Tensors and ops have dense ids; ops stand
in topological order by construction, so nothing walks it recursively.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.core.dims import DimLabel, Size
from tilewise.core.dtypes import DType, dtype
from tilewise.core.errors import ShapeError

__all__ = ["Graph", "OpNode", "Template", "TensorNode", "TensorSpec"]

Label = DimLabel | None


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without where it lies.

    Attributes:
        shape: sizes, row-major, last dim fastest.
        dtype: element type.
        labels: per dim what it counts, or None; the distribution hint (`core.dims.DimLabel`).
        name: path such as `layers.3.mlp.up_proj.weight`; empty for intermediate results.
        tile_hint: rows per tile, or None for the planner's choice.
        storage: how elements lie: `rows` (row-major, all dims but the last count rows), `scalars` (all dims count rows
            of one element), `packed` (a weight's panels) or `vector` (one row).
    """

    shape: tuple[Size, ...]
    dtype: DType
    labels: tuple[Label, ...] = ()
    name: str = ""
    tile_hint: int | None = None
    storage: str = "rows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", dtype(self.dtype))
        labels = tuple(self.labels) or (None,) * len(self.shape)
        if len(labels) != len(self.shape):
            raise ShapeError(
                f"[ir.TensorSpec] one label per dim; got {len(labels)} labels for shape {self.shape} of {self.name!r}"
            )
        object.__setattr__(self, "labels", labels)
        bad = [s for s in self.shape if isinstance(s, int) and s < 1]
        if bad or not self.shape:
            raise ShapeError(f"[ir.TensorSpec] sizes must be at least 1; got {self.shape} for {self.name!r}")

    @classmethod
    def parameter(cls, shape: tuple[Size, ...], dtype: str | DType, name: str = "", **kw: Any) -> TensorSpec:
        """A trained tensor: it has a name."""
        return cls(tuple(shape), dtype if isinstance(dtype, DType) else _dtype(dtype), name=name, **kw)

    @classmethod
    def activation(cls, shape: tuple[Size, ...], dtype: str | DType, **kw: Any) -> TensorSpec:
        """A computed tensor."""
        return cls(tuple(shape), dtype if isinstance(dtype, DType) else _dtype(dtype), **kw)

    def renamed(self, name: str) -> TensorSpec:
        """The same under another name."""
        return replace(self, name=name)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(s) for s in self.shape)}]"


_dtype = dtype


@dataclass(frozen=True)
class TensorNode:
    """A tensor of a graph. `producer` is the op that makes it, None for what comes from outside.

    `kind` is one of `input`, `parameter`, `state`, `constant`, `result`.
    """

    id: int
    spec: TensorSpec
    kind: str
    producer: int | None = None

    @property
    def shape(self) -> tuple[Size, ...]:
        """Sizes of the tensor."""
        return self.spec.shape


@dataclass(frozen=True)
class OpNode:
    """One operation: `op` names a class of `graph.ops`, tensors are ids, `attrs` is hashable."""

    id: int
    op: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "forward"
    label: str = ""


@dataclass(frozen=True)
class Graph:
    """A frozen graph.

    Attributes:
        inputs / parameters / states / constants: ids of tensors from outside, in the order they were declared.
        outputs: name -> tensor id.
        reduction_chunks: C of docs/numerics.md rule 2.
        constant_values: what constants hold (NumPy arrays), by tensor id.
        templates: templates that `call` ops of this graph use, by key.
    """

    name: str
    tensors: tuple[TensorNode, ...]
    ops: tuple[OpNode, ...]
    outputs: Mapping[str, int]
    reduction_chunks: int = 8
    constant_values: Mapping[int, Any] = field(default_factory=dict)
    templates: Mapping[str, Template] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[TensorNode]:
        """Tensors of one kind, in order of declaration."""
        return [t for t in self.tensors if t.kind == kind]

    def spec(self, tensor: int) -> TensorSpec:
        """The spec of a tensor id."""
        return self.tensors[tensor].spec


@dataclass(frozen=True)
class Template:
    """The structure of a repeated layer: a graph with an ordered interface.

    A `call` op binds `arguments` (tensor ids of `graph`: inputs, constants, parameters, states, in that order) to
    tensors of the calling graph, and `results` to its outputs.
    """

    key: str
    graph: Graph
    arguments: tuple[int, ...]
    results: tuple[int, ...]
