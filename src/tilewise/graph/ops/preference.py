"""What losses on pairs of sequences need: the log-probability of each sequence, and the value of the
other sequence of a pair.

Sequences 2i and 2i + 1 of a batch are a pair. Every device and every microbatch has whole pairs, so
no pair is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.errors import PlanError
from tilewise.graph.ops.common import incoming
from tilewise.graph.ops.loss import emit_row_losses, label_bounds
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Bounds, Gradients, Op, Partial, Specs, operand, register, result
from tilewise.ir.tape import Tape

__all__: list[str] = []


@register
class SequenceLogProbs(Op):
    """The sum of the log-probabilities of a sequence's counted labels, in fp32. Results are this sum
    and two tensors for the backward pass, as those of `cross_entropy`. `inv_count` is 1.
    """

    name = "sequence_log_probs"
    whole = "s"
    partial_values = (
        Partial("max", "v", "log_probs stats sums", "max"),
        Partial("sums", "v", "log_probs sums"),
    )
    logits: int = operand("b s v")
    labels: int = operand("b s", indexes="v", storage="scalars")
    inv_count: int = operand("1", dtype="f32", storage="vector")
    ignore_index: int
    log_probs: int = result("b", dtype="f32", storage="scalars")
    stats: int = result("b s 2", dtype="f32")
    sums: int = result("b s", dtype="f32", storage="scalars")

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        return label_bounds(self, spec)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """That of the cross-entropy of a sequence's rows, times -dy of the sequence."""
        (dlogits,) = tape.op(
            SequenceLogProbsBackward(
                logits=tape.use(self.logits),
                labels=tape.use(self.labels),
                stats=tape.use(self.stats),
                sums=tape.use(self.sums),
                factor=tape.scale(incoming(self, grads), -1.0),
                ignore_index=self.ignore_index,
            )
        )
        return {"logits": dlogits}

    def lower(self, low: Lowering) -> None:
        """Row losses per row tile, then the sum of each sequence's rows."""
        x, seq = low.tensor(self.logits), low.size(low.spec(self.logits).shape[1])
        rows = low.temp_like(low.tensor(self.sums), dtype="f32", name="row_losses")
        emit_row_losses(self, low, rows)
        low.emit(
            "reduce_sum",
            over=x,
            dtype="f32",
            tiles={"out": low.row(self.log_probs, div=seq), "x": low.row(rows)},
            ints={"rank": 1, "size": [seq], "stays": [0]},
            floats={"factor": -1.0},
        )


@register
class SequenceLogProbsBackward(Op):
    """Gradient of the logits, which it may overwrite. The rows of a sequence have one factor."""

    name = "sequence_log_probs_backward"
    whole = "s"
    logits: int = operand("b s v")
    labels: int = operand("b s", dtype="i32", storage="scalars")
    stats: int = operand("b s 2", dtype="f32")
    sums: int = operand("b s", dtype="f32", storage="scalars")
    factor: int = operand("b", dtype="f32")
    ignore_index: int
    dlogits: int = result(like="logits", in_place="logits")

    def lower(self, low: Lowering) -> None:
        """One task per sequence."""
        x, spec = low.tensor(self.logits), low.spec(self.logits)
        seq = low.size(spec.shape[1])
        rows = low.temp_like(low.tensor(self.sums), dtype="f32", name="row_losses")
        low.emit(
            "cross_entropy_grad",
            over=x,
            step=seq,
            dtype=x.dtype,
            tiles={
                "dlogits": low.row(self.dlogits),
                "loss_rows": low.row(rows),
                "logits": low.row(x),
                "stats": low.row(self.stats),
                "sums": low.row(self.sums),
                "labels": low.row(self.labels),
                "inv_count": low.row(self.factor, div=seq),
            },
            ints={"vocab_begin": low.first_element(self.logits, 2), "ignore_index": self.ignore_index},
        )


@register
class SwapPairs(Op):
    """For each sequence, the number of the other sequence of its pair."""

    name = "swap_pairs"
    x: int = operand("b", dtype="f32")
    out: int = result("b", dtype="f32", storage="scalars")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy, with the sequences of each pair exchanged."""
        return {"x": tape.op(SwapPairs(x=incoming(self, grads)))[0]}

    def lower(self, low: Lowering) -> None:
        """One task for all pairs of this device's microbatch.

        Raises:
            PlanError: a device or microbatch has half a pair.
        """
        count = low.tensor(self.x).extent.constant
        if count % 2:
            raise PlanError(
                f"[graph.swap_pairs] every device and microbatch must have whole pairs of sequences; got {count} "
                "sequences; choose a number of pairs that the devices of the batch times the microbatches divide"
            )
        low.emit(
            "rearrange",
            over=low.one,
            step=0,
            dtype="f32",
            tiles={"out": low.whole(self.out), "x": low.whole(self.x)},
            ints={
                "rank": 2,
                "source_elements": count,
                "first": 1,
                "fill": 0,
                "size": [count // 2, 2],
                "stride": [2, -1],
                "begin": [0, 0],
                "end": [count // 2, 2],
            },
        )
