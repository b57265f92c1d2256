"""Cross-entropy over a vocabulary that may be sharded, and its gradient. The maximum of a row is
exact. The sum of exp over a row is computed per k split of the vocabulary and then along a tree.

The inputs are logits, labels and `inv_count`. `inv_count` is one divided by the number of counted
labels in the whole global batch. It must be known before the backward pass; `GraphInstance.step`
computes it from the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.core.dims import Size
from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import fixed, incoming, leading, require, require_floats, require_indices
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, PartialValue, Signature, register
from tilewise.ir.tape import Gradient, Tape

__all__: list[str] = []


@register
class CrossEntropy(Op):
    """Cross-entropy. Outputs are the mean loss `[1]`, each row's share of the mean, and two tensors
    for the backward pass: stats (maximum and target logit of each row) and sums (sum of exp of each
    row).
    """

    name = "cross_entropy"
    accumulates = (0,)
    signature = Signature(3, attributes={"ignore_index": int})

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """Labels are columns of the logits, or the value of labels that are not counted."""
        assert inputs[0] is not None
        return {1: (0, inputs[0].shape[-1], attrs["ignore_index"])}

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """loss `[1]`, rows `[...]`, stats `[..., 2]`, sums `[...]`, all fp32."""
        logits, labels, inv_count = inputs
        assert logits is not None and labels is not None and inv_count is not None
        require_floats(self.name, logits)
        require(
            len(logits.shape) > 1 and logits.storage == "rows" and labels.shape == logits.shape[:-1],
            self.name,
            "one label per row of logits",
            logits,
            labels,
        )
        require_indices(self.name, "labels", labels)
        require(
            inv_count.shape == (1,) and inv_count.dtype.name == "f32" and inv_count.storage == "vector",
            self.name,
            "the inverse count must be one f32",
            inv_count,
            advice='declare it with storage="vector"',
        )
        f32, rows = DTYPES["f32"], labels.shape
        return [
            TensorSpec((1,), f32, storage="vector"),
            TensorSpec(rows, f32, labels.labels, storage="scalars"),
            TensorSpec((*rows, 2), f32, (*labels.labels, None)),
            TensorSpec(rows, f32, labels.labels, storage="scalars"),
        ]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The vocabulary is contracted in all outputs, rows only in the loss."""
        assert inputs[0] is not None
        rows = leading(inputs[0])
        return Factors(
            ((*rows, "v"), rows, ("o",)),
            (("o",), rows, (*rows, "t"), rows),
            partial_values=(
                PartialValue("max", ("v",), (0, 1, 2, 3), "max"),
                PartialValue("sums", ("v",), (0, 1, 3)),
                PartialValue("loss", rows, (0,), tree=BATCH_SPLITS),
            ),
        )

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """Every row's share times dy."""
        logits, labels, inv_count = op.given
        factor = tape.multiply(tape.use(inv_count), incoming(op, grads))
        used = [*(tape.use(i) for i in (logits, labels, op.outputs[2], op.outputs[3])), factor]
        return [*tape.op("cross_entropy_backward", used, **op.attrs), None, None]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """Tasks compute the maxima, the sums and the row losses of a row tile. Then the row losses
        are added, batch split by batch split.
        """
        logits, labels, inv_count = op.given
        _, rows, stats, sums = op.outputs
        t = low.tensor(logits)
        largest, total = low.pending_reduction(op, "max"), low.pending_reduction(op, "sums")
        spec = low.spec(logits)
        begin = low.first_element(logits, len(spec.shape) - 1)
        stats_target = low.temp_like(low.tensor(stats), dtype="f32", name="max") if largest else stats
        place = {"vocab_begin": begin, "ignore_index": op.attrs["ignore_index"]}
        low.emit(
            "cross_entropy_max",
            op,
            over=t,
            dtype=t.dtype,
            tiles={"stats": low.row(stats_target), "logits": low.row(logits), "labels": low.row(labels)},
            ints=place,
        )
        if largest:
            low.all_reduce(op, stats_target, stats, None, largest)
        k_splits = low.label_splits(spec.labels[-1], fixed(spec.shape[-1]), total)
        sums_target = low.temp_like(low.tensor(sums), dtype="f32", name="sums") if total else sums
        low.emit(
            "cross_entropy_sum",
            op,
            over=t,
            dtype=t.dtype,
            tiles={"sums": low.row(sums_target), "logits": low.row(logits), "stats": low.row(stats)},
            ints={"num_k_splits": len(k_splits), "range": [v for c in k_splits for v in c]},
        )
        if total:
            low.all_reduce(op, sums_target, sums, None, total)
        low.emit(
            "cross_entropy_grad",
            op,
            over=t,
            dtype=t.dtype,
            tiles={
                "loss_rows": low.row(rows),
                "logits": low.row(logits),
                "stats": low.row(stats),
                "sums": low.row(sums),
                "labels": low.row(labels),
                "inv_count": low.whole(inv_count),
            },
            ints=place,
        )
        split = low.split_temp(1, "loss_splits")
        tiles = {"split": low.row(split, div=low.split_rows), "x": low.row(rows)}
        low.emit("row_sum_split", op, over=t, tiles=tiles, ints=low.split_cut)
        low.split_tree(op, 0, split)


@register
class CrossEntropyBackward(Op):
    """Gradient of the logits. Inputs are logits, labels, stats, sums, and the inverse count times
    the gradient of the loss. The output is the gradient, which overwrites the logits.
    """

    name = "cross_entropy_backward"
    in_place = ((0, 0),)
    signature = Signature(5, attributes={"ignore_index": int})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of the logits."""
        logits = inputs[0]
        assert logits is not None
        return [TensorSpec(logits.shape, logits.dtype, logits.labels)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Nothing is contracted: the statistics are complete."""
        assert inputs[0] is not None
        rows = leading(inputs[0])
        logits = (*rows, "v")
        return Factors((logits, rows, (*rows, "t"), rows, ("o",)), (logits,))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        logits, labels, stats, sums, inv_count = op.given
        t = low.tensor(logits)
        spec = low.spec(logits)
        begin = low.first_element(logits, len(spec.shape) - 1)
        rows = low.temp_like(low.tensor(sums), dtype="f32", name="loss_rows")
        low.emit(
            "cross_entropy_grad",
            op,
            over=t,
            dtype=t.dtype,
            tiles={
                "dlogits": low.row(op.outputs[0]),
                "loss_rows": low.row(rows),
                "logits": low.row(logits),
                "stats": low.row(stats),
                "sums": low.row(sums),
                "labels": low.row(labels),
                "inv_count": low.whole(inv_count),
            },
            ints={"vocab_begin": begin, "ignore_index": op.attrs["ignore_index"]},
        )
