"""From a graph, a mesh and a strategy to a layout of every tensor.

What comes from outside is laid out by its labels; results follow the factors of the ops, one axis at a time. A
conflict is an error that names the op, both layouts and where each came from.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.core.errors import LayoutError
from tilewise.core.mesh import MICRO, Axes, DeviceMesh
from tilewise.core.tree import allowed_widths
from tilewise.ir.batch import BatchCut
from tilewise.ir.contractions import factors_of
from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import GraphLayout, Record, TensorLayout, show_axes, show_layout
from tilewise.strategy.records import make_records
from tilewise.strategy.strategy import DistributionStrategy

__all__ = ["propagate_layouts"]


def propagate_layouts(
    graph: Graph, mesh: DeviceMesh, strategy: DistributionStrategy, batch: BatchCut
) -> GraphLayout:
    """Layouts of a whole graph; every template is laid out once per distinct layout of its arguments.

    Raises:
        LayoutError: operands of an op disagree, or a strategy shards what an op needs whole.
    """
    cache: dict[tuple[str, tuple[TensorLayout, ...]], GraphLayout] = {}
    outside = {t.id: _from_labels(t.spec, mesh, strategy, batch) for t in graph.tensors if t.kind != "result"}
    return _propagate(graph, mesh, outside, batch, cache)


def _from_labels(
    spec: TensorSpec, mesh: DeviceMesh, strategy: DistributionStrategy, batch: BatchCut
) -> TensorLayout:
    layout = []
    for label in spec.labels:
        given = strategy.axes_for(label.name) if label is not None else ()
        axes = tuple(axis for axis in given if mesh.size(axis) > 1)
        is_cut = label is not None and label.is_summed_by_leaves and batch.microbatches > 1
        layout.append(place_time(axes, mesh, batch) if is_cut else axes)
    return _unique(spec.name, tuple(layout))


def place_time(axes: Axes, mesh: DeviceMesh, batch: BatchCut) -> Axes:
    """Where microbatches stand among the axes that share the batch.

    Outside, so that sums are completed once per step, are as many axes as hold nodes of the tree over leaves: those
    whose devices the leaves allow. The others share every microbatch, and sums are completed once per microbatch.
    """
    outside = max(n for n in range(len(axes) + 1) if mesh.size(*axes[:n]) in allowed_widths(batch.leaves))
    return (*axes[:outside], MICRO, *axes[outside:])


def _propagate(
    graph: Graph,
    mesh: DeviceMesh,
    known: Mapping[int, TensorLayout],
    batch: BatchCut,
    cache: dict[tuple[str, tuple[TensorLayout, ...]], GraphLayout],
) -> GraphLayout:
    layouts: dict[int, TensorLayout] = dict(known)
    calls: dict[int, GraphLayout] = {}
    records: dict[tuple[int, str], tuple[Record, ...]] = {}
    for op in graph.ops:
        if op.op != "call":
            layouts.update(zip(op.outputs, _through(graph, op, layouts)))
            continue
        template = graph.templates[op.attrs["template"]]
        given = tuple(layouts[i] for i in op.inputs if i is not None)
        key = (template.key, given)
        if key not in cache:
            counts.sharded += 1
            cache[key] = _propagate(template.graph, mesh, dict(zip(template.arguments, given)), batch, cache)
        calls[op.id] = cache[key]
        inner = (*template.results, *op.attrs["saved"])
        layouts.update(zip(op.outputs, (cache[key].use[t] for t in inner)))
    unknown: TensorLayout = ()
    every = tuple(layouts.get(t.id, unknown) for t in graph.tensors)
    for op in graph.ops:
        if op.op != "call":
            records |= make_records(graph, op, factors_of(graph, op), mesh, every, batch)
    return GraphLayout(mesh, every, every, calls, records)


def _through(graph: Graph, op: OpNode, layouts: Mapping[int, TensorLayout]) -> list[TensorLayout]:
    """Layouts of an op's outputs from those of its inputs."""
    factors = factors_of(graph, op)
    axis_of: dict[str, tuple[Axes, int]] = {}
    for tensor, names in zip(op.inputs, factors.inputs):
        if tensor is None or names is None:
            continue
        for name, axis in zip(names, layouts[tensor]):
            seen = axis_of.setdefault(name, (axis, tensor))
            if seen[0] != axis:
                raise LayoutError(_conflict(graph, op, name, seen, (axis, tensor)))
            if axis and name in factors.whole:
                raise LayoutError(
                    f"[strategy.propagate] {op.op} needs a dim whole; got {graph.spec(tensor)} of {op.label!r} sharded "
                    f"on {show_axes(axis)}; take the label off that dim"
                )
    return [_unique(op.label, tuple(axis_of.get(n, ((), -1))[0] for n in names)) for names in factors.outputs]


def _unique(name: str, layout: TensorLayout) -> TensorLayout:
    used = [a for axes in layout for a in axes]
    if len(set(used)) != len(used):
        raise LayoutError(
            f"[strategy.propagate] an axis can shard one dim of a tensor; got {show_layout(layout)} of {name!r}; "
            "label its dims differently"
        )
    return layout


def _conflict(graph: Graph, op: OpNode, factor: str, *sides: tuple[Axes, int]) -> str:
    (axis_a, a), (axis_b, b) = sides
    name_a, name_b = graph.spec(a).name or f"result {a}", graph.spec(b).name or f"result {b}"
    return (
        f"[strategy.propagate] operands of {op.label!r} must agree on factor {factor!r}; got {name_a} {graph.spec(a)} "
        f"on {show_axes(axis_a)} and {name_b} {graph.spec(b)} on {show_axes(axis_b)}; label both dims alike"
    )
