"""The cost of layout changes between ops, in words. A plan's explanation begins with these lines.

A slice costs nothing. A gather reads the part of its result that the device does not have. A sum
that is delivered in shards reads the peers' parts of the device's own shard. Figures are per
microbatch; if shares are unequal, they are the mean over devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewise.core.dims import UNLABELLED, shard_range, upper_bound
from tilewise.core.mesh import MICRO
from tilewise.ir.graph import PANEL_ROWS, Graph, OpNode
from tilewise.ir.layout import (
    BATCH_SPLITS,
    GraphLayout,
    PendingReduction,
    TensorLayout,
    show_axes,
    show_layout,
)

__all__ = ["CHANGES", "COPYING", "explain_reshards", "explain_storage", "is_layer", "is_prefetch"]

COPYING = ("all_gather_parameters", "fetch", "store", "put_back")
"""Ops of calls that only copy tensors."""

CHANGES = ("all_gather", "slice")
"""Ops that only change the layout of a tensor."""


def explain_reshards(graph: Graph, layout: GraphLayout, microbatches: int) -> list[str]:
    """A line per change of layout in a step. The changes that read most come first. Equal changes
    of several layers are one line.
    """
    costs: dict[str, tuple[int, int]] = {}
    _collect(graph, layout, microbatches, costs)
    lines = []
    for text, (elements, uses) in sorted(costs.items(), key=lambda f: (-f[1][0] * f[1][1], f[0])):
        cost = f"reads {elements:,} elements" if elements else "moves nothing"
        lines.append(f"{text}: {cost}{f', {uses} times' if uses > 1 else ''}")
    return lines


def _collect(graph: Graph, layout: GraphLayout, microbatches: int, costs: dict[str, tuple[int, int]]) -> None:
    for op in graph.ops:
        if op.op == "call":
            inner = graph.templates[op.attrs["template"]].graph
            _collect(inner, layout.calls[op.id], microbatches, costs)
        elif op.op in CHANGES:
            text, elements = _change(graph, layout, microbatches, op)
            costs[text] = elements, costs.get(text, (0, 0))[1] + 1
    for pending_reductions in layout.pending_reductions.values():
        for pending in pending_reductions:
            if pending.arrives_in_shards and pending.tree != BATCH_SPLITS:
                text, elements = _sum_in_shards(graph, layout, microbatches, pending)
                costs[text] = elements, costs.get(text, (0, 0))[1] + 1


def _change(graph: Graph, layout: GraphLayout, microbatches: int, op: OpNode) -> tuple[str, int]:
    (result,), spec = op.outputs, graph.spec(op.outputs[0])
    before, after = layout.compute[op.given[0]], layout.compute[result]
    size = prod(upper_bound(s) for s in spec.shape)
    parts = [size // _parts(layout, shares, microbatches) for shares in (before, after)]
    text = f"{op.label} {spec} from {show_layout(before)} to {show_layout(after)}"
    return text, max(parts[1] - parts[0], 0)


def _sum_in_shards(
    graph: Graph, layout: GraphLayout, microbatches: int, pending: PendingReduction
) -> tuple[str, int]:
    op, (after, *_) = graph.ops[pending.op], pending.arrives
    spec = graph.spec(op.outputs[pending.outputs[0]])
    shard = prod(upper_bound(s) for s in spec.shape) // _parts(layout, after, microbatches)
    text = f"reduce_scatter:{op.label} {spec} to {show_layout(after)}"
    return text, shard * (layout.mesh.size(*pending.group) - 1)


def explain_storage(graph: Graph, layout: GraphLayout) -> list[str]:
    """Lines that say how sharded state is stored, and how much of it a device gathers per
    microbatch. Empty if no state is sharded.
    """
    if not layout.storage_axes:
        return []
    cut = {*layout.storage_axes}
    size = layout.mesh.size(*layout.storage_axes)
    weights = graph.of_kind("parameter")
    in_shards = [t for t in weights if cut & {*layout.compute[t.id][0]}]
    vectors = len(weights) - len(in_shards)
    lines = [
        f"{len(in_shards)} weights, their gradients and optimizer states lie in {size} parts each, along "
        f"{show_axes(layout.storage_axes)}; {vectors} vectors are not cut"
    ]
    few = sum(_panels(graph, layout, t.id) < size for t in in_shards)
    if few:
        lines.append(
            f"{few} of the weights have fewer than {size} panels of {PANEL_ROWS} rows: some devices have no part"
        )
    about = "" if all(_has_equal_shards(graph, layout, t.id) for t in in_shards) else "about "
    for phase in ("forward", "backward"):
        calls = [
            op for op in graph.ops if op.phase == phase and is_prefetch(graph, op, ("all_gather_parameters",))
        ]
        most = max((_elements(graph, layout, op) for op in calls), default=0)
        total = sum(_elements(graph, layout, op) for op in calls)
        if calls:
            lines.append(
                f"{phase}: gathers {total:,} elements in {len(calls)} calls, {most:,} in the largest; reads "
                f"{about}{total - total // size:,} of them from peers"
            )
    return lines


def _panels(graph: Graph, layout: GraphLayout, weight: int) -> int:
    """The panels of a weight on the device with the smallest share."""
    spec = graph.spec(weight)
    rows, label = upper_bound(spec.shape[0]), spec.labels[0] or UNLABELLED
    shards = layout.mesh.size(
        *(axis for axis in layout.compute[weight][0] if axis not in layout.storage_axes)
    )
    if shards > 1:
        ranges = (shard_range(label, rows, graph.k_splits, shards, s) for s in range(shards))
        rows = min(end - begin for begin, end in ranges)
    return -(-rows // PANEL_ROWS)


def _has_equal_shards(graph: Graph, layout: GraphLayout, weight: int) -> bool:
    """Whether all devices store the same number of whole panels of a weight."""
    rows = upper_bound(graph.spec(weight).shape[0])
    return rows % (layout.mesh.size(*layout.compute[weight][0]) * PANEL_ROWS) == 0


def is_prefetch(graph: Graph, op: OpNode, how: Sequence[str] = ("all_gather_parameters", "fetch")) -> bool:
    """Whether an op is a call that gathers tensors from their storage shards, or fetches them from
    a file.
    """
    if op.op != "call":
        return False
    return all(inner.op in how for inner in graph.templates[op.attrs["template"]].graph.ops)


def is_layer(graph: Graph, op: OpNode) -> bool:
    """Whether an op is the call of a layer, and not one that only copies tensors."""
    return op.op == "call" and not is_prefetch(graph, op, COPYING)


def _elements(graph: Graph, layout: GraphLayout, op: OpNode) -> int:
    """Elements of a call's results on a device."""
    return sum(
        prod(upper_bound(s) for s in graph.spec(t).shape) // _parts(layout, layout.compute[t], 1)
        for t in op.outputs
    )


def _parts(layout: GraphLayout, shares: TensorLayout, microbatches: int) -> int:
    """The number of parts into which a layout divides a tensor, in space and time."""
    axes = [axis for dim in shares for axis in dim]
    return layout.mesh.size(*axes) * (microbatches if MICRO in axes else 1)
