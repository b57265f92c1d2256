"""The rules of partial values: each has a record, and the parts of each record make up its tree.

A contraction over a dim that several devices or microbatches share gives each of them a part only. Which parts an op
completes stands in its factors; everything else is refused here, whatever op, label or axis are called. The intervals
of a record are folded up to the root: what is missing, held twice, out of order or no node of the tree is found, on all
devices alike or on one.
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
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import GROUPS, K_SPLITS, GraphLayout, Record, in_space, show_axes
from tilewise.ir.op import Factors

__all__ = ["validate_records"]


def validate_records(graph: Graph, layout: GraphLayout) -> None:
    """Every shared contraction has its records, in layers too, and every record folds to the root of its tree.

    Raises:
        LayoutError: names the op, the dim and the axes, or the interval that breaks the tree.
    """
    seen: set[int] = set()
    _validate(graph, layout, seen)


def _validate(graph: Graph, layout: GraphLayout, seen: set[int]) -> None:
    if id(layout) in seen:
        return
    seen.add(id(layout))
    is_shared = any(axes for use in {*layout.use} for axes in use)
    for op in graph.ops:
        if op.op == "call":
            inner = layout.calls[op.id]
            if id(inner) not in seen:
                _validate(graph.templates[op.attrs["template"]].graph, inner, seen)
            continue
        if not is_shared:
            continue  # nothing to be completed
        factors = factors_of(graph, op)
        for contraction in find_contractions(graph, op, factors, SeenLayouts.of(op, layout.use)):
            _require_record(graph, op, factors, contraction, layout)
    for records in layout.records.values():
        for record in records:
            _require_same_rows(graph, record)
            _fold(graph, layout, record)


def _require_record(
    graph: Graph, op: OpNode, factors: Factors, contraction: Contraction, layout: GraphLayout
) -> None:
    for output in contraction.outputs:
        covering = [p for p in factors.partials if is_covered_by(contraction, output, p)]
        if not covering:
            raise LayoutError(_refusal(graph, op, contraction))
        for partial in covering:
            records = layout.records.get((op.id, partial.name), ())
            is_whole = contraction.tree == GROUPS and group_of(graph, op, contraction)[0] >= layout.mesh.size(
                *contraction.axes
            )
            if not is_whole and not any(_is_record_of(r, contraction) for r in records):
                raise LayoutError(
                    f"[ir.validate] a value of which devices or microbatches hold parts has a record; got none of "
                    f"{partial.name!r} of {op.label!r} ({op.op}) on {show_axes(contraction.axes)}; please report the "
                    "layout"
                )


def _require_same_rows(graph: Graph, record: Record) -> None:
    """Parts of a sum over k splits, or what devices tell each other, are of the same rows on all of them. A sum may
    arrive in shards of its last dim."""
    for layout in record.arrives if record.tree == K_SPLITS else ():
        dims = layout[:-1] if record.combine == "sum" else layout
        twice = [axis for axes in dims for axis in axes if axis in record.group]
        if twice:
            op = graph.ops[record.op]
            raise LayoutError(
                f"[ir.validate] devices that complete a value have the same rows of it; got axis {twice[0]!r}, which "
                f"cuts the result of {op.label!r} ({op.op}) as well as what its {record.partial!r} runs over; map "
                "their labels to different axes, or drop the hint"
            )


def _is_record_of(record: Record, contraction: Contraction) -> bool:
    """What has no tree may be told to more devices than hold parts of it."""
    same = record.axes == contraction.axes
    return same or (record.combine == "or" and {*contraction.axes} <= {*record.axes})


def _fold(graph: Graph, layout: GraphLayout, record: Record) -> None:
    op = graph.ops[record.op]
    where = f"{record.partial!r} of {op.label!r} ({op.op}) on {show_axes(record.axes)}"
    parts = {len(held) for held in record.held}
    devices = layout.mesh.size(*record.axes)
    if len(parts) != 1 or (sum(len(held) for held in record.held) % devices):
        raise LayoutError(
            f"[ir.validate] every member of a device group holds a part; got {record.held} for {devices} devices in "
            f"{where}; please report the layout"
        )
    for held in record.held:
        problem = fold_intervals(held, record.count)
        if problem:
            raise LayoutError(
                f"[ir.validate] parts of a value make up the tree over its {record.count} {record.tree}; got "
                f"{problem}, of {len(held)} parts, in {where}; please report the layout"
            )


def _refusal(graph: Graph, op: OpNode, contraction: Contraction) -> str:
    spec, label = graph.spec(contraction.tensor), contraction.label
    name = spec.name or f"result {contraction.tensor}"
    kinds = ("input", "parameter", "constant")
    outside = [t.spec.name for t in graph.tensors if t.kind in kinds and label in t.spec.labels][:4]
    who = f"axes {show_axes(in_space(contraction.axes))}" if in_space(contraction.axes) else "microbatches"
    return (
        "[ir.validate] a sum over a dim that devices or microbatches share must be completed among them; got dim "
        f"{contraction.dim} ({label.name if label else 'unlabelled'!r}, as in {', '.join(outside) or 'no input'}) of "
        f"{name} {spec} on {who}, over which {op.op!r} of {op.label!r} completes no sum over {contraction.tree}; take "
        "the label off that dim, or map it to no axis"
    )
