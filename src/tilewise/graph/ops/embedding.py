"""Looking up embedding rows by token id, and selecting rows by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.graph.ops.common import incoming, require, require_indices
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Partial, Specs, operand, optional, register, result
from tilewise.ir.resolve import FLOATS
from tilewise.ir.tape import Tape

__all__ = ["EmbeddingWeightGradient"]


@register
class Embedding(Op):
    """Looks up rows of a table. If the vocabulary is sharded, each row is taken from the device that
    has it, and no values are added.
    """

    name = "embedding"
    whole = "d"
    partial_values = (Partial("selected", "v", "out", "or"),)
    ids: int = operand("...", indexes="v")
    table: int = operand("v d", storage="packed")
    out: int = result("... d")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Rows of dy are added at the ids."""
        ids, table, dy = tape.use(self.ids), tape.use(self.table), incoming(self, grads)
        return {"table": tape.later(EmbeddingWeightGradient(table=table, ids=ids, dy=dy, added=None))}

    def lower(self, low: Lowering) -> None:
        """One task per row tile, then the selection among the devices that share the vocabulary."""
        out = low.tensor(self.out)
        pending = low.pending_reduction("selected")
        target = low.temp_like(out, dtype=out.dtype, name="rows") if pending else out
        ints, quantised = {"vocab_begin": low.first_element(self.table, 0)}, low.spec(self.table).format
        low.emit(
            "embedding" if quantised is None else "embedding_quantised",
            over=out,
            dtype=out.dtype,
            tiles={"out": low.row(target), "ids": low.row(self.ids), "table": low.whole(self.table)},
            ints=ints if quantised is None else {**ints, "format": quantised.number},
        )
        if pending:
            low.all_reduce(target, self.out, None, pending)


@register
class EmbeddingWeightGradient(Op):
    """Gradient of a table in fp32. Within a batch split, rows of dy are added at their ids in token
    order. The sums of batch splits are then added along the tree over batch splits.

    `added` is a second gradient of the table that is added. It is used only if there is one
    microbatch, because otherwise it is not complete yet (`graph.passes.fuse_into_table_gradients`).
    """

    name = "embedding_dw"
    partial_values = (Partial("tokens", "...", "dtable", tree=BATCH_SPLITS),)
    table: int = operand("n k", packed=True, shape_only=True)
    ids: int = operand("...", dtype="i32")
    dy: int = operand("... k")
    added: int | None = optional("n k", dtype="f32", packed=True)
    dtable: int = result(like="table", dtype="f32", accumulates=True, in_place="added")

    def lower(self, low: Lowering) -> None:
        """One task per block of table rows, over all batch splits of this device. Then the
        reduction over the devices that share the batch.
        """
        target = low.accumulator(self.dtable, self.added)
        low.emit(
            "matmul_dw",
            over=target.ref,
            step=target.ref.tile_rows,
            dtype=low.spec(self.table).dtype.name,
            tiles={
                "out": low.row(target.ref),
                "ids": low.whole(self.ids),
                "de": low.whole(self.dy),
                "carry": [low.row(carry) for carry in target.carries],
            },
            ints={
                "split_rows": low.split_rows,
                "vocab_begin": low.first_of_sum(self.dtable),
                "padded_len": low.padded_len,
            },
            priority=-1,
        )
        low.finish_accumulation(target)


@register
class GatherRows(Op):
    """Selects rows of x `[T, d]`, or of i32 `[T]` with one number per row, by index."""

    name = "gather_rows"
    whole = "t"
    x: int = operand("t d", dtype="any")
    index: int = operand("s", indexes="t")
    out: int = result("s d", indices_of="x")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Numbers have no second dim."""
        return {"x": "t", "out": "s"} if len(spec(self.x).shape) == 1 else {}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """`[S, d]`, or `[S]`."""
        x, index = spec(self.x), spec(self.index)
        if len(x.shape) == 1:
            require_indices(self.name, "numbers", x, index)
            return [TensorSpec(index.shape, x.dtype, index.labels, storage=x.storage)]
        require(x.dtype.name in FLOATS, self.name, "x must be f32 or bf16", x)
        return [TensorSpec((*index.shape, x.shape[1]), x.dtype, (*index.labels, x.labels[1]))]
