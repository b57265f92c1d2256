"""From a graph, a mesh and a strategy to a layout of every tensor.

What comes from outside is laid out by its labels; results follow the factors of the ops, one axis at a time. A
conflict is an error that names the op, both layouts and where each came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout
from tilewise.ir.op import op_named
from tilewise.strategy.strategy import DistributionStrategy

__all__ = ["propagate_layouts"]


def propagate_layouts(graph: Graph, mesh: DeviceMesh, strategy: DistributionStrategy) -> GraphLayout:
    """Layouts of a whole graph; every template is laid out once per distinct layout of its arguments.

    Raises:
        LayoutError: operands of an op disagree, or a strategy shards what an op needs whole.
    """
    cache: dict[tuple[str, tuple[TensorLayout, ...]], GraphLayout] = {}
    outside = {t.id: _from_labels(t.spec, mesh, strategy) for t in graph.tensors if t.kind != "result"}
    return _propagate(graph, mesh, outside, cache)


def _from_labels(spec: TensorSpec, mesh: DeviceMesh, strategy: DistributionStrategy) -> TensorLayout:
    axes = [strategy.rules.get(label.name) if label else None for label in spec.labels]
    return _unique(spec.name, tuple(axis if axis and mesh.size(axis) > 1 else None for axis in axes))


def _propagate(
    graph: Graph,
    mesh: DeviceMesh,
    known: Mapping[int, TensorLayout],
    cache: dict[tuple[str, tuple[TensorLayout, ...]], GraphLayout],
) -> GraphLayout:
    layouts: dict[int, TensorLayout] = dict(known)
    calls: dict[int, GraphLayout] = {}
    for op in graph.ops:
        if op.op != "call":
            layouts.update(zip(op.outputs, _through(graph, op, layouts)))
            continue
        template = graph.templates[op.attrs["template"]]
        given = tuple(layouts[i] for i in op.inputs if i is not None)
        key = (template.key, given)
        if key not in cache:
            counts.sharded += 1
            cache[key] = _propagate(template.graph, mesh, dict(zip(template.arguments, given)), cache)
        calls[op.id] = cache[key]
        inner = (*template.results, *op.attrs["saved"])
        layouts.update(zip(op.outputs, (cache[key].tensors[t] for t in inner)))
    unknown: TensorLayout = ()
    return GraphLayout(mesh, tuple(layouts.get(t.id, unknown) for t in graph.tensors), calls)


def _through(graph: Graph, op: OpNode, layouts: Mapping[int, TensorLayout]) -> list[TensorLayout]:
    """Layouts of an op's outputs from those of its inputs."""
    specs = [None if i is None else graph.spec(i) for i in op.inputs]
    factors = op_named(op.op).factors(specs, op.attrs)
    axis_of: dict[str, tuple[str | None, int]] = {}
    for tensor, names in zip(op.inputs, factors.inputs):
        if tensor is None or names is None:
            continue
        for name, axis in zip(names, layouts[tensor]):
            seen = axis_of.setdefault(name, (axis, tensor))
            if seen[0] != axis:
                raise LayoutError(_conflict(graph, op, name, seen, (axis, tensor)))
            if axis is not None and name in factors.whole:
                raise LayoutError(
                    f"[strategy.propagate] {op.op} needs a dim whole; got {graph.spec(tensor)} of {op.label!r} sharded "
                    f"on {axis!r}; take the label off that dim"
                )
    return [
        _unique(op.label, tuple(axis_of.get(n, (None, -1))[0] for n in names)) for names in factors.outputs
    ]


def _unique(name: str, layout: TensorLayout) -> TensorLayout:
    used = [a for a in layout if a]
    if len(set(used)) != len(used):
        raise LayoutError(
            f"[strategy.propagate] an axis can shard one dim of a tensor; got {layout} of {name!r}; label its dims "
            "differently"
        )
    return layout


def _conflict(graph: Graph, op: OpNode, factor: str, *sides: Sequence[object]) -> str:
    (axis_a, a), (axis_b, b) = ((s[0], s[1]) for s in sides)
    assert isinstance(a, int) and isinstance(b, int)
    name_a, name_b = graph.spec(a).name or f"result {a}", graph.spec(b).name or f"result {b}"
    return (
        f"[strategy.propagate] operands of {op.label!r} must agree on factor {factor!r}; got {name_a} {graph.spec(a)} "
        f"on {axis_a!r} and {name_b} {graph.spec(b)} on {axis_b!r}; label both dims alike"
    )
