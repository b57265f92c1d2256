"""Cross-entropy over a vocabulary that may be sharded, and its gradient. The maximum of a row is
exact. The sum of exp over a row is computed per k split of the vocabulary and then along a tree.

`inv_count` is one divided by the number of counted labels in the whole global batch. It must be
known before the backward pass; `GraphInstance.step` computes it from the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tilewise.graph.ops.common import fixed, incoming
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering, Ref
from tilewise.ir.op import Bounds, Gradients, Op, Partial, Specs, operand, register, result
from tilewise.ir.tape import Tape

__all__ = ["CrossEntropy", "emit_row_losses", "label_bounds"]


@register
class CrossEntropy(Op):
    """Cross-entropy. Results are the mean loss, each row's share of the mean, and two tensors for
    the backward pass: stats (maximum and target logit of each row) and sums (sum of exp of each
    row).
    """

    name = "cross_entropy"
    partial_values = (
        Partial("max", "v", "loss rows stats sums", "max"),
        Partial("sums", "v", "loss rows sums"),
        Partial("loss", "...", "loss", tree=BATCH_SPLITS),
    )
    logits: int = operand("... v")
    labels: int = operand("...", indexes="v")
    inv_count: int = operand("1", dtype="f32", storage="vector")
    ignore_index: int
    loss: int = result("1", dtype="f32", storage="vector", accumulates=True)
    rows: int = result("...", dtype="f32", storage="scalars")
    stats: int = result("... 2", dtype="f32")
    sums: int = result("...", dtype="f32", storage="scalars")

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        return label_bounds(self, spec)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Every row's share times dy."""
        factor = tape.multiply(tape.use(self.inv_count), incoming(self, grads))
        logits, labels = tape.use(self.logits), tape.use(self.labels)
        (dlogits,) = tape.op(
            CrossEntropyBackward(
                logits=logits,
                labels=labels,
                stats=tape.use(self.stats),
                sums=tape.use(self.sums),
                inv_count=factor,
                ignore_index=self.ignore_index,
            )
        )
        return {"logits": dlogits}

    def lower(self, low: Lowering) -> None:
        """Tasks compute the row losses of a row tile. Then the row losses are added, batch split by
        batch split.
        """
        x = low.tensor(self.logits)
        emit_row_losses(self, low, self.rows)
        split = low.split_temp(1, "loss_splits")
        tiles = {"split": low.row(split, div=low.split_rows), "x": low.row(self.rows)}
        low.emit("row_sum_split", over=x, tiles=tiles, ints=low.split_cut)
        low.split_tree(self.loss, split)


class _Classifies(Protocol):
    """An op whose tensors `emit_row_losses` reads and writes, as `CrossEntropy` names them."""

    @property
    def logits(self) -> int: ...
    @property
    def labels(self) -> int: ...
    @property
    def inv_count(self) -> int: ...
    @property
    def ignore_index(self) -> int: ...
    @property
    def stats(self) -> int: ...
    @property
    def sums(self) -> int: ...


def label_bounds(op: _Classifies, spec: Specs) -> dict[str, Bounds]:
    """Labels are columns of the logits, or the value of labels that are not counted."""
    return {"labels": (0, spec(op.logits).shape[-1], op.ignore_index)}


def emit_row_losses(op: _Classifies, low: Lowering, rows: int | Ref) -> None:
    """Emit the maxima, the sums and the losses of all rows. The op has the partial values `max` and
    `sums` of `CrossEntropy`.

    Args:
        op: the op that is lowered.
        low: where instructions are emitted.
        rows: for the loss of each row, times `inv_count`.
    """
    x, spec = low.tensor(op.logits), low.spec(op.logits)
    largest, total = low.pending_reduction("max"), low.pending_reduction("sums")
    begin = low.first_element(op.logits, len(spec.shape) - 1)
    place = {"vocab_begin": begin, "ignore_index": op.ignore_index}
    stats, logits = low.tensor(op.stats), low.row(x)
    stats_target = low.temp_like(stats, dtype="f32", name="max") if largest else stats
    tiles = {"stats": low.row(stats_target), "logits": logits, "labels": low.row(op.labels)}
    low.emit("cross_entropy_max", over=x, dtype=x.dtype, tiles=tiles, ints=place)
    if largest:
        low.all_reduce(stats_target, op.stats, None, largest)
    k_splits = low.label_splits(spec.labels[-1], fixed(spec.shape[-1]), total)
    sums = low.tensor(op.sums)
    sums_target = low.temp_like(sums, dtype="f32", name="sums") if total else sums
    low.emit(
        "cross_entropy_sum",
        over=x,
        dtype=x.dtype,
        tiles={"sums": low.row(sums_target), "logits": logits, "stats": low.row(stats)},
        ints={"num_k_splits": len(k_splits), "range": [v for c in k_splits for v in c]},
    )
    if total:
        low.all_reduce(sums_target, op.sums, None, total)
    tiles = {
        "loss_rows": low.row(rows),
        "logits": logits,
        "stats": low.row(stats),
        "sums": low.row(sums),
        "labels": low.row(op.labels),
        "inv_count": low.whole(op.inv_count),
    }
    low.emit("cross_entropy_grad", over=x, dtype=x.dtype, tiles=tiles, ints=place)


@register
class CrossEntropyBackward(Op):
    """Gradient of the logits, which it may overwrite. `inv_count` is the inverse count times the
    gradient of the loss. Nothing is contracted, because the statistics are complete.
    """

    name = "cross_entropy_backward"
    logits: int = operand("... v")
    labels: int = operand("...", dtype="i32")
    stats: int = operand("... 2", dtype="f32")
    sums: int = operand("...", dtype="f32")
    inv_count: int = operand("1", dtype="f32")
    ignore_index: int
    dlogits: int = result(like="logits", in_place="logits")

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        x = low.tensor(self.logits)
        begin = low.first_element(self.logits, len(low.spec(self.logits).shape) - 1)
        rows = low.temp_like(low.tensor(self.sums), dtype="f32", name="loss_rows")
        low.emit(
            "cross_entropy_grad",
            over=x,
            dtype=x.dtype,
            tiles={
                "dlogits": low.row(self.dlogits),
                "loss_rows": low.row(rows),
                "logits": low.row(x),
                "stats": low.row(self.stats),
                "sums": low.row(self.sums),
                "labels": low.row(self.labels),
                "inv_count": low.whole(self.inv_count),
            },
            ints={"vocab_begin": begin, "ignore_index": self.ignore_index},
        )
