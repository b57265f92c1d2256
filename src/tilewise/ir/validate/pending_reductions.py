"""The rules of partial values: each partial value (ir/layout.py) has a pending reduction, whose parts
make up the whole tree.

This module combines the intervals of a pending reduction up to the root, which finds parts that are
missing, present twice, out of order, or not a node of the tree, on all devices or on one.
"""

from __future__ import annotations

from tilewise.core.errors import LayoutError
from tilewise.core.tree import fold_intervals
from tilewise.ir.contractions import (
    Contraction,
    SeenLayouts,
    factors_of,
    find_contractions,
    group_of,
    is_covered_by,
)
from tilewise.ir.factors import Factors
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import GROUPS, K_SPLITS, GraphLayout, PendingReduction, in_space, show_axes

__all__ = ["validate_pending_reductions"]


def validate_pending_reductions(graph: Graph, layout: GraphLayout) -> None:
    """Check that every shared contraction, also in layers, has its pending reductions, and that
    every pending reduction combines to the root of its tree.

    Raises:
        LayoutError: names the op, the dim and the axes, or the interval that is not a node.
    """
    _validate(graph, layout, set())


def _validate(graph: Graph, layout: GraphLayout, seen: set[int]) -> None:
    if id(layout) in seen:
        return
    seen.add(id(layout))
    is_shared = any(axes for use in {*layout.compute} for axes in use)
    for op in graph.ops:
        if op.op == "call":
            _validate(graph.templates[op.attrs["template"]].graph, layout.calls[op.id], seen)
            continue
        if not is_shared:
            continue  # there is nothing to complete
        factors = factors_of(graph, op)
        for contraction in find_contractions(graph, op, factors, SeenLayouts.of(op, layout.compute)):
            _require_pending(graph, op, factors, contraction, layout)
    for pending_reductions in layout.pending_reductions.values():
        for pending in pending_reductions:
            _require_same_rows(graph, pending)
            _fold(graph, layout, pending)


def _require_pending(
    graph: Graph, op: OpNode, factors: Factors, contraction: Contraction, layout: GraphLayout
) -> None:
    for output in contraction.outputs:
        covering = [p for p in factors.partial_values if is_covered_by(contraction, output, p)]
        if not covering:
            raise LayoutError(_incomplete_sum(graph, op, contraction))
        for partial in covering:
            pending_reductions = layout.pending_reductions.get((op.id, partial.name), ())
            is_whole = contraction.tree == GROUPS and group_of(graph, op, contraction)[0] >= layout.mesh.size(
                *contraction.axes
            )
            if not is_whole and not any(_is_pending_of(r, contraction) for r in pending_reductions):
                raise LayoutError(
                    "[ir.validate] a partial value must have a pending reduction; got "
                    f"none of {partial.name!r} of {op.label!r} ({op.op}) on {show_axes(contraction.axes)}; please "
                    "report the layout"
                )


def _require_same_rows(graph: Graph, pending: PendingReduction) -> None:
    """The parts of a sum over k splits, or other exchanged values, have the same rows on all
    devices. A sum may be delivered in shards of its last dim.
    """
    for layout in pending.arrives if pending.tree == K_SPLITS else ():
        dims = layout[:-1] if pending.combine == "sum" else layout
        twice = [axis for axes in dims for axis in axes if axis in pending.group]
        if twice:
            op = graph.ops[pending.op]
            raise LayoutError(
                f"[ir.validate] devices that complete a value must have the same rows of it; got axis {twice[0]!r}, "
                f"which cuts the result of {op.label!r} ({op.op}) as well as what its {pending.partial!r} runs over; "
                "map their labels to different axes, or drop the hint"
            )


def _is_pending_of(pending: PendingReduction, contraction: Contraction) -> bool:
    """Whether a pending reduction completes a contraction. Without a tree (`or`), devices without
    parts may take part too.
    """
    same = pending.axes == contraction.axes
    return same or (pending.combine == "or" and {*contraction.axes} <= {*pending.axes})


def _fold(graph: Graph, layout: GraphLayout, pending: PendingReduction) -> None:
    op = graph.ops[pending.op]
    where = f"{pending.partial!r} of {op.label!r} ({op.op}) on {show_axes(pending.axes)}"
    parts = {len(leaf_ranges) for leaf_ranges in pending.leaf_ranges}
    devices = layout.mesh.size(*pending.axes)
    if len(parts) != 1 or (sum(len(leaf_ranges) for leaf_ranges in pending.leaf_ranges) % devices):
        raise LayoutError(
            f"[ir.validate] every member of a device group must have a part; got {pending.leaf_ranges} for {devices} "
            f"devices in {where}; please report the layout"
        )
    for leaf_ranges in pending.leaf_ranges:
        problem = fold_intervals(leaf_ranges, pending.count)
        if problem:
            raise LayoutError(
                f"[ir.validate] parts of a value must make up the tree over its {pending.count} {pending.tree}; got "
                f"{problem}, of {len(leaf_ranges)} parts, in {where}; please report the layout"
            )


def _incomplete_sum(graph: Graph, op: OpNode, contraction: Contraction) -> str:
    spec, label = graph.spec(contraction.tensor), contraction.label
    name = spec.name or f"result {contraction.tensor}"
    kinds = ("input", "parameter", "constant")
    outside = [t.spec.name for t in graph.tensors if t.kind in kinds and label in t.spec.labels][:4]
    who = f"axes {show_axes(in_space(contraction.axes))}" if in_space(contraction.axes) else "microbatches"
    return (
        "[ir.validate] a sum over a dim that devices or microbatches share must be completed among them; got dim "
        f"{contraction.dim} ({label.name if label else 'unlabelled'!r}, as in {', '.join(outside) or 'no input'}) of "
        f"{name} {spec} on {who}, over which {op.op!r} of {op.label!r} completes no sum over {contraction.tree}; "
        "remove the label from that dim, or map it to no axis"
    )
