"""Looking up embedding rows by token id, and selecting rows by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewise.core.dims import Size
from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import incoming, leading, require, require_floats, require_indices
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, PartialValue, Signature, register
from tilewise.ir.tape import Gradient, Tape

__all__: list[str] = []


@register
class Embedding(Op):
    """Looks up rows of a table. Inputs are ids and the table `[vocab, hidden]`. If the vocabulary
    is sharded, each row is taken from the device that has it, and no values are added.
    """

    name = "embedding"
    signature = Signature(2)

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """The table."""
        return position == 1

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """Ids are rows of the table."""
        assert inputs[1] is not None
        return {0: (0, inputs[1].shape[0], None)}

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """`[..., hidden]` in the table's dtype."""
        ids, table = inputs
        assert ids is not None and table is not None
        require_indices("embedding", "ids", ids, table)
        require_floats("embedding", table)
        require(
            table.storage == "packed" and len(table.shape) == 2,
            "embedding",
            "the table must be a parameter with two dims",
            ids,
            table,
        )
        return [TensorSpec((*ids.shape, table.shape[1]), table.dtype, (*ids.labels, table.labels[1]))]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The vocabulary is contracted by selection."""
        assert inputs[0] is not None
        rows = tuple(f"b{i}" for i in range(len(inputs[0].shape)))
        selected = PartialValue("selected", ("v",), (0,), "or")
        return Factors((rows, ("v", "d")), ((*rows, "d"),), whole=frozenset("d"), partial_values=(selected,))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """Rows of dy are added at the ids."""
        ids, table = (tape.use(i) for i in op.given)
        return [None, tape.later("embedding_dw", [table, ids, incoming(op, grads), None])]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile, then the selection among the devices that share the vocabulary."""
        ids, table = op.given
        out = low.tensor(op.outputs[0])
        pending = low.pending_reduction(op, "selected")
        target = low.temp_like(out, dtype=out.dtype, name="rows") if pending else op.outputs[0]
        begin = low.first_element(table, 0)
        low.emit(
            "embedding",
            op,
            over=out,
            dtype=out.dtype,
            tiles={"out": low.row(target), "ids": low.row(ids), "table": low.whole(table)},
            ints={"vocab_begin": begin},
        )
        if pending:
            low.all_reduce(op, target, op.outputs[0], None, pending)


@register
class EmbeddingWeightGradient(Op):
    """Gradient of a table in fp32. Within a batch split, rows are added at their ids in token
    order. The sums of batch splits are then added along the tree over batch splits.

    Inputs are the table (for its shape), ids, the gradient of the rows `[..., hidden]`, and a
    second gradient of the table that is added, or None. The second gradient is used only if there
    is one microbatch, because otherwise it is not complete yet
    (`graph.passes.fuse_into_table_gradients`).
    """

    name = "embedding_dw"
    accumulates = (0,)
    shape_of = frozenset({0})
    in_place = ((0, 3),)
    signature = Signature(4, absent=frozenset({3}))

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """The table and the other gradient."""
        return position in (0, 3)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """fp32 with the table's shape."""
        table = inputs[0]
        assert table is not None
        return [replace(table, dtype=DTYPES["f32"], name="")]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Tokens are contracted; the table's dims are not."""
        assert inputs[2] is not None
        tokens = leading(inputs[2])
        names = (("n", "k"), tokens, (*tokens, "k"), None if inputs[3] is None else ("n", "k"))
        return Factors(
            names, (("n", "k"),), partial_values=(PartialValue("tokens", tokens, (0,), tree=BATCH_SPLITS),)
        )

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per block of table rows, over all batch splits of this device. Then the
        reduction over the devices that share the batch.
        """
        table, ids, grad, *added = op.given
        target = low.accumulator(op, 0, *added)
        begin = low.first_of_sum(op, 0)
        low.emit(
            "matmul_dw",
            op,
            over=target.ref,
            step=target.ref.tile_rows,
            dtype=low.spec(table).dtype.name,
            tiles={
                "out": low.row(target.ref),
                "ids": low.whole(ids),
                "de": low.whole(grad),
                "carry": [low.row(carry) for carry in target.carries],
            },
            ints={"split_rows": low.split_rows, "vocab_begin": begin, "padded_len": low.padded_len},
            priority=-1,
        )
        low.finish_accumulation(op, target)


@register
class GatherRows(Op):
    """Selects rows of x by index. Inputs are x and index `[S]`, where x is `[T, d]`, or i32 `[T]`
    with one number per row.
    """

    name = "gather_rows"
    signature = Signature(2)
    passes_indices = ((0, 0),)

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """Indices are rows of x."""
        assert inputs[0] is not None
        return {1: (0, inputs[0].shape[0], None)}

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """`[S, d]`, or `[S]`."""
        x, index = inputs
        assert x is not None and index is not None
        require_indices(self.name, "index", index, x)
        require(len(index.shape) == 1, self.name, "an index must be [S]", index)
        if len(x.shape) == 1:
            require_indices(self.name, "numbers", x, index)
            return [TensorSpec(index.shape, x.dtype, index.labels, storage=x.storage)]
        require(len(x.shape) == 2, self.name, "needs [T, d] and [S]", x, index)
        require_floats(self.name, x)
        return [TensorSpec((*index.shape, x.shape[1]), x.dtype, (*index.labels, x.labels[1]))]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Rows of x are not sharded."""
        assert inputs[0] is not None
        rest = ("d",) * (len(inputs[0].shape) - 1)
        return Factors((("t", *rest), ("s",)), (("s", *rest),), whole=frozenset("t"))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile of the result."""
        x, index = op.given
        out = low.tensor(op.outputs[0])
        tiles = {"out": low.row(out), "x": low.whole(x), "index": low.row(index)}
        low.emit("gather_rows", op, over=out, dtype=out.dtype, tiles=tiles)
