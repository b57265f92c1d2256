"""Derives the pending reductions of ops whose layouts are known.

A partial value is a value of which several devices or microbatches each have a part. Its pending
reduction says which device has which leaves of the tree along which parts are combined, and where
the result is delivered.

There is a pending reduction for each value that an op declares as partial, if devices or
microbatches share its factor. A number of devices is rejected if their parts would not be nodes of
the tree. The error names k splits or batch splits that fit.
`ir.validate.validate_pending_reductions` checks the result again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tilewise.core.dims import DimLabel, shard_range
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import MICRO, DeviceMesh
from tilewise.core.tree import MAX_COUNT, allowed_widths, node_shares, node_widths, widths_in_words
from tilewise.ir.batch import BatchCut, suggest_batch_splits
from tilewise.ir.contractions import (
    Contraction,
    SeenLayouts,
    factors_of,
    find_contractions,
    group_of,
    is_covered_by,
)
from tilewise.ir.factors import PartialValue
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import BATCH_SPLITS, GROUPS, K_SPLITS, PendingReduction, TensorLayout, show_axes

__all__ = ["make_pending_reductions", "pending_reductions_of"]


def make_pending_reductions(
    graph: Graph, compute: Sequence[TensorLayout], mesh: DeviceMesh, batch: BatchCut
) -> dict[tuple[int, str], tuple[PendingReduction, ...]]:
    """Derive the pending reductions of all ops of a graph, whose operands need no reshards.

    Args:
        compute: the layout of each tensor.

    Raises:
        LayoutError: as `pending_reductions_of`.
    """
    made: dict[tuple[int, str], tuple[PendingReduction, ...]] = {}
    for op in graph.ops:
        if op.op != "call":
            made |= pending_reductions_of(graph, op, mesh, SeenLayouts.of(op, compute), batch)
    return made


def pending_reductions_of(
    graph: Graph, op: OpNode, mesh: DeviceMesh, layouts: SeenLayouts, batch: BatchCut
) -> dict[tuple[int, str], tuple[PendingReduction, ...]]:
    """Derive the pending reductions of one op.

    Raises:
        LayoutError: two dims of one sum are shared, or a device's part would not be a node of the
            tree. The message names the `k_splits` or `batch_splits` that would fit.
    """
    factors = factors_of(graph, op)
    pending_by_name: dict[tuple[int, str], list[PendingReduction]] = {}
    for contraction in find_contractions(graph, op, factors, layouts):
        for partial in factors.partial_values:
            if not any(is_covered_by(contraction, output, partial) for output in contraction.outputs):
                continue
            pending = _pending(graph, op, partial, contraction, mesh, layouts, batch)
            mine = pending_by_name.setdefault((op.id, partial.name), [])
            if pending is None or any(_covers(r, pending) for r in mine):
                continue
            mine[:] = [r for r in mine if not _covers(pending, r)]
            if mine and partial.combine == "sum":
                raise LayoutError(
                    f"[strategy.pending_reductions] a sum may be shared along only one of its dims; got "
                    f"{partial.name!r} of {op.label!r} ({op.op}) on {show_axes(mine[0].axes)} and "
                    f"{show_axes(pending.axes)}; remove one of the labels"
                )
            mine.append(pending)
    return {key: tuple(pending) for key, pending in pending_by_name.items() if pending}


def _covers(one: PendingReduction, other: PendingReduction) -> bool:
    """Whether completing `one` also completes `other`: both have the same device group, or the
    values of `other` have no tree.
    """
    return one.axes == other.axes or (one.combine == "or" and {*other.axes} <= {*one.axes})


def _pending(
    graph: Graph,
    op: OpNode,
    partial: PartialValue,
    contraction: Contraction,
    mesh: DeviceMesh,
    layouts: SeenLayouts,
    batch: BatchCut,
) -> PendingReduction | None:
    axes, groups, heads, count = contraction.axes, 1, 1, graph.k_splits
    parts = mesh.size(*axes) * (batch.microbatches if MICRO in axes else 1)
    if partial.tree == BATCH_SPLITS:
        count = batch.batch_splits
    elif partial.tree == GROUPS:
        heads, count = group_of(graph, op, contraction)
        groups = min(heads, parts)
    width = parts // groups
    is_cut = partial.tree == K_SPLITS  # k splits may be shared unequally
    shares = node_shares(count, width) if is_cut or width in allowed_widths(count) else ()
    if partial.combine == "or" and not shares:
        count = width  # `or` adds nothing, so any number of devices will do
        shares = node_shares(count, width)
    if not shares or parts % groups:
        if partial.tree == GROUPS:
            raise LayoutError(
                "[strategy.pending_reductions] devices must hold whole groups of query heads (one per KV head), or "
                f"share one in parts that are nodes of its tree; got {parts} devices on {show_axes(axes)} for {heads} "
                f"groups of {count} in {op.label!r} ({op.op}); {_groups_in_words(heads, count, graph.k_splits)}"
            )
        is_batch = partial.tree == BATCH_SPLITS
        raise LayoutError(
            f"[strategy.pending_reductions] parts of a sum must be nodes of its tree; got {width} parts of "
            f"{partial.name!r} of {op.label!r} ({op.op}) on {show_axes(axes)}, for {count} "
            f"{partial.tree.replace('_', ' ')}; "
            f"{suggest_batch_splits(batch, width) if is_batch else widths_in_words(width, count, 'graph.k_splits')}"
        )
    if parts == groups:
        return None  # every KV head is on one device with all its query heads
    arrives = tuple(layouts.outputs[o] for o in partial.outputs)
    return PendingReduction(
        op.id,
        partial.name,
        partial.combine,
        partial.outputs,
        partial.tree,
        count,
        axes,
        (shares,) * groups,
        arrives,
    )


def _groups_in_words(heads: int, members: int, k_splits: int) -> str:
    """How many devices may share groups of query heads. If only one may, also the `k_splits` with
    which more may.
    """
    widths_of_splits = [_widths_of_groups(heads, members, k_splits)]
    if widths_of_splits[0] == [1] and 1 < heads * members <= MAX_COUNT:
        widths_of_splits.append(_widths_of_groups(heads, members, heads * members))
    words = [", ".join(map(str, widths)) for widths in widths_of_splits]
    return f"choose {f', or set graph.k_splits to {heads * members} for '.join(words)}"


def _widths_of_groups(heads: int, members: int, k_splits: int) -> list[int]:
    """Numbers of devices that can share heads, for a group size and a number of k splits."""
    label = DimLabel("kv_heads", 1, members)
    widths = []
    for width in node_widths(k_splits):
        with suppress(LayoutError):
            shard_range(label, heads, k_splits, width, 0)
            if width <= heads or (width % heads == 0 and width // heads in allowed_widths(members)):
                widths.append(width)
    return widths
