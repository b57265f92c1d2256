"""Layouts for one device and one microbatch, where no tensor is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tilewise.core.mesh import DeviceMesh
from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout, TensorLayout

__all__ = ["lay_out_alone"]


def lay_out_alone(graph: Graph, mesh: DeviceMesh, require_hints: Callable[[Graph], object]) -> GraphLayout:
    """Layouts of a graph for a single device. They equal the layouts that `propagate_layouts` would
    compute.

    Args:
        graph: the graph, with its templates.
        mesh: a mesh of one device.
        require_hints: checks the layout hints of a graph's tensors. On one device every valid hint
            is satisfied.
    """
    require_hints(graph)
    layout_by_key: dict[str, GraphLayout] = {}
    calls = {}
    for op in graph.ops:
        if op.op == "call":
            key = op.attrs["template"]
            if key not in layout_by_key:
                counts.sharded += 1
                template = graph.templates[key]
                require_hints(template.graph)
                layout_by_key[key] = _laid_out(template.graph, mesh, template.arguments, {})
            calls[op.id] = layout_by_key[key]
    return _laid_out(graph, mesh, (t.id for t in graph.tensors if t.kind != "result"), calls)


def _laid_out(
    graph: Graph, mesh: DeviceMesh, outside: Iterable[int], calls: dict[int, GraphLayout]
) -> GraphLayout:
    """A layout without axes for every input, parameter, state and result; other tensors have an
    empty layout.
    """
    whole: dict[int, TensorLayout] = {}  # by the number of dims
    layouts: list[TensorLayout] = [()] * len(graph.tensors)
    for tensor in (*outside, *(o for op in graph.ops for o in op.outputs)):
        dims = len(graph.tensors[tensor].spec.shape)
        layout = whole.get(dims)
        layouts[tensor] = whole.setdefault(dims, ((),) * dims) if layout is None else layout
    compute = tuple(layouts)
    return GraphLayout(mesh, compute, compute, calls)
