"""How the batch of a step is divided.

A batch split is a fixed part of the batch. Sums over the batch are computed per batch split and
then along a tree, so the number of batch splits determines the bits of results. Microbatches are
parts of a step that run one after another. Their number changes no bit.

The label of a dim says whether the dim is the batch (`DimLabel.is_summed_by_batch_splits`). The
name of the dim does not matter. Microbatches divide the batch in time as devices divide it in
space. So the operands of one op must count the batch along the same dims, and gradients and losses
must sum along these dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod

from tilewise.core.dims import Dim, upper_bound
from tilewise.core.errors import LayoutError, PlanError
from tilewise.core.tree import MAX_COUNT, allowed_widths
from tilewise.core.validation import Validator
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.op import op_named

__all__ = ["BatchCut", "cut_batch", "default_batch_splits", "suggest_batch_splits"]

MAX_DEFAULT_BATCH_SPLITS = 16
_validate = Validator("ir", PlanError)
_Rows = tuple[int, int, Dim | None]


@dataclass(frozen=True)
class BatchCut:
    """The batch of a step and how it is divided.

    Attributes:
        size: sequences of a step over all devices and microbatches; 0 for graphs without a batch.
        rows: rows per sequence. If the length is symbolic, this is its bound.
        batch_splits: number of equal parts of the batch that are summed separately, then along a
            tree (docs/numerics.md, rule 5).
        microbatches: number of parts of a step that run one after another.
        length: the symbolic length of sequences, whose value is given for every step; None if
            sequences have a fixed length.
        bound: maximum rows per sequence if the graph has a symbolic length; some of these rows may
            be padding. It stays set if a plan fixes the length. 0 if the graph has a fixed length.
    """

    size: int = 0
    rows: int = 0
    batch_splits: int = 1
    microbatches: int = 1
    length: Dim | None = None
    bound: int = 0


def default_batch_splits(batch: int, most: int = MAX_DEFAULT_BATCH_SPLITS) -> int:
    """The default number of batch splits: the largest power of two up to `most` that divides the
    batch.

    The number determines bits, so it depends only on the batch, never on the devices. For example,
    12 sequences have 4 batch splits by default, which 1, 2 or 4 devices can share. Three devices
    need 3, 6 or 12 batch splits, which the user must set, and which two or four devices cannot
    share.
    """
    return min(most, batch & -batch)


def cut_batch(graph: Graph, microbatches: int = 1, batch_splits: int | None = None) -> BatchCut:
    """Divide the batch of a graph's inputs.

    Raises:
        PlanError: counts are out of range, batch splits do not divide the batch, or inputs have
            different batches.
        LayoutError: inputs have labels but no label has the batch role, so microbatches cannot
            divide the inputs. Or the operands of an op count the batch along different dims.
    """
    microbatches = _validate.integer("cut_batch", "accumulation", microbatches, 1, MAX_COUNT)
    sizes = _batch_and_rows(graph)
    if batch_splits is not None:
        batch_splits = _validate.integer("cut_batch", "batch_splits", batch_splits, 1, MAX_COUNT)
    if sizes is None:
        _require_role(graph)
        if microbatches > 1:
            raise LayoutError(
                f"[ir.cut_batch] accumulation needs inputs that count the batch; got none in {graph.name!r}; label dim "
                "0 of its inputs tw.BATCH"
            )
        return BatchCut()
    _require_batch_sums(graph)
    if microbatches > 1:
        _require_microbatches(graph)
    batch, rows, length = sizes
    batch_splits = default_batch_splits(batch) if batch_splits is None else batch_splits
    if batch % batch_splits:
        _validate.invalid(
            "cut_batch",
            "batch_splits must divide the batch",
            f"{batch_splits} for {batch}",
            "choose a divisor of the batch",
        )
    return BatchCut(batch, rows, batch_splits, microbatches, length, rows if length is not None else 0)


def suggest_batch_splits(batch: BatchCut, blocks: int) -> str:
    """The hint of an error message, if devices x microbatches do not divide the batch splits.

    It names numbers of devices x microbatches that would fit, and batch splits or a batch that
    would.

    Args:
        batch: the requested batch.
        blocks: devices that share the batch, times microbatches.
    """
    widths = allowed_widths(batch.batch_splits)
    words = f"{', '.join(str(w) for w in widths)} devices x microbatches"
    devices, rest = divmod(blocks, batch.microbatches)
    counts = [w // devices for w in widths if w % devices == 0] if batch.microbatches > 1 and not rest else []
    if counts:
        plural = "" if devices == 1 else "s"
        words += f" (accumulation {', '.join(map(str, counts))} on {devices} device{plural})"
    fits = (n for n in range(blocks, MAX_COUNT + 1) if batch.size % n == 0 and blocks in allowed_widths(n))
    good = ", ".join(str(n) for n in islice(fits, 4))
    if good:
        return f"choose {words}, or set batch_splits to {good} (part of the result's bits)"
    if blocks > MAX_COUNT:
        return f"choose {words}"
    size = blocks
    while size < batch.size:
        size *= 2  # blocks times a power of two, as batch splits must be
    fitting = (n for n in range(blocks, MAX_COUNT + 1) if size % n == 0 and blocks in allowed_widths(n))
    batch_splits = min(fitting, key=lambda n: abs(n - batch.batch_splits))
    return (
        f"choose a batch that is a multiple of {blocks} and batch splits that fit it, for example a batch of {size} "
        f"and {batch_splits} batch splits (both are part of the result), or {words}"
    )


def _require_role(graph: Graph) -> None:
    """Reject a graph with labelled inputs that sums over their batch without a label of the batch
    role. Without labels, the batch is one batch split.
    """
    counted = sorted({t.spec.labels[0].name for t in graph.of_kind("input") if t.spec.labels[0] is not None})
    summed = next(iter(_batch_sums(graph)), None)
    if counted and summed is not None:
        _, op = summed
        raise LayoutError(
            "[ir.cut_batch] losses and gradients are sums over the batch, which one label must count; got only "
            f"{', '.join(counted)} on inputs of {graph.name!r}, and {op.label!r} ({op.op}); label their dim 0 "
            "tw.BATCH, or DimLabel(..., is_summed_by_batch_splits=True)"
        )


def _ops(graph: Graph) -> Iterator[tuple[Graph, OpNode]]:
    """All ops except calls, with their graphs, also in layers."""
    return ((inner, op) for inner in graph.with_layers() for op in inner.ops if op.op != "call")


def _batch_sums(graph: Graph) -> Iterator[tuple[Graph, OpNode]]:
    """The ops that sum over the batch, with their graphs, also in layers."""
    return ((inner, op) for inner, op in _ops(graph) if op_named(op.op).declared.accumulates)


def _require_microbatches(root: Graph) -> None:
    """Check that operands that share a factor agree: in the dims with this factor, all operands
    count the batch or none does.

    Raises:
        LayoutError: names the op and both operands.
    """
    for graph, op in _ops(root):
        first: dict[str, tuple[int, bool]] = {}
        factors = factors_of(graph, op)
        for tensor, names in zip(op.inputs, factors.inputs):
            for factor, label in zip(names or (), graph.spec(tensor).labels if tensor is not None else ()):
                is_batch = label is not None and label.is_summed_by_batch_splits
                if is_batch and factor in factors.whole:
                    raise LayoutError(
                        "[ir.cut_batch] an op that combines elements of the whole batch needs one microbatch; got "
                        f"{op.label!r} ({op.op}) on {graph.spec(tensor or 0)}; use accumulation=1"
                    )
                other, was_batch = first.setdefault(factor, (tensor or 0, is_batch))
                if was_batch != is_batch:
                    a, b = (graph.spec(t).name or f"result {t}" for t in (other, tensor or 0))
                    raise LayoutError(
                        "[ir.cut_batch] accumulation cuts the batch, so operands must be labelled alike; got "
                        f"{a} and {b} in {op.label!r}, of which one counts the batch along {factor!r}; label both dims "
                        "tw.BATCH"
                    )


def _require_batch_sums(root: Graph) -> None:
    """Check that every op that sums over the batch sums a dim that counts the batch.

    Raises:
        LayoutError: names the op.
    """
    for graph, op in _batch_sums(root):
        factors = factors_of(graph, op)
        summed = {f for p in factors.partial_values if p.tree == BATCH_SPLITS for f in p.factors}
        labels = [
            label
            for tensor, names in zip(op.inputs, factors.inputs)
            if tensor is not None and names is not None
            for factor, label in zip(names, graph.spec(tensor).labels)
            if factor in summed
        ]
        if summed and not any(label is not None and label.is_summed_by_batch_splits for label in labels):
            raise LayoutError(
                "[ir.cut_batch] in a graph with a batch, gradients and losses are sums over the batch; got "
                f"{op.label!r} ({op.op}), whose rows do not count it; label dim 0 of its inputs "
                "tw.BATCH, and do not cut or join dim 0 on the way"
            )


def _batched(graph: Graph) -> list[TensorNode]:
    """Inputs and states that have a part for every sequence of a step."""
    nodes = (*graph.of_kind("input"), *graph.of_kind("constant"))
    return [t for t in nodes if (label := t.spec.labels[0]) is not None and label.is_summed_by_batch_splits]


def _batch_and_rows(graph: Graph) -> _Rows | None:
    """The size of the batch, which all batched inputs have in common, rows per sequence and the
    symbol of the length, which is the same for all inputs that have one. Inputs of fixed sizes may
    have other numbers of rows; without a symbol, this is the largest. None if there is no batched
    input.
    """
    rows_by_input: dict[str, _Rows] = {}
    for t in _batched(graph):
        lead = len(t.spec.shape) - (t.spec.storage == "rows" and len(t.spec.shape) > 1)
        batch, *sizes = t.spec.shape[:lead]
        lengths = [s for s in sizes if isinstance(s, Dim)]
        if isinstance(batch, Dim) or len(lengths) > 1 or any(s.min < 1 for s in lengths):
            _validate.invalid(
                "cut_batch",
                "a batch must have a fixed size, and its sequences at most one symbolic size, from 1 on",
                f"{t.spec} {t.spec.name!r}",
                "fix the other sizes",
            )
        rows_by_input[t.spec.name] = (
            batch,
            prod(upper_bound(s) for s in sizes),
            lengths[0] if lengths else None,
        )
    batches = {batch for batch, _, _ in rows_by_input.values()}
    symbolic = {rows for rows in rows_by_input.values() if rows[2] is not None}
    if len(batches) > 1 or len(symbolic) > 1:
        words = ", ".join(
            f"{name} {batch} x {rows if length is None else f'up to {rows}'}"
            for name, (batch, rows, length) in rows_by_input.items()
        )
        raise PlanError(
            "[ir.cut_batch] batched inputs must have one batch, and, if the length of sequences is symbolic, one "
            f"number of rows per element; got {words}; give them the same leading dims"
        )
    return next(iter(symbolic), None) or max(rows_by_input.values(), key=lambda rows: rows[1], default=None)
