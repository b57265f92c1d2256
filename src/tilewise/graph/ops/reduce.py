"""The sum of all elements of a tensor, and the reverse, which gives every element of a tensor one
number.

If the tensor has a batch dim, rows are added batch split by batch split, as in the loss
(docs/numerics.md, rule 5). The sum therefore has the same bits on every mesh. It is complete after
the last microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import incoming, require, require_floats
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, PartialValue, Signature, register
from tilewise.ir.tape import Gradient, Tape

__all__: list[str] = []


def _dims(spec: TensorSpec) -> tuple[str, ...]:
    """Factor names: rows `b0`, `b1`, …, and `d` for the elements of a row."""
    num_rows = len(spec.shape) - (spec.storage == "rows" and len(spec.shape) > 1)
    return tuple(f"b{i}" for i in range(num_rows)) + ("d",) * (len(spec.shape) - num_rows)


@register
class Sum(Op):
    """The sum of all elements, `[1]` in fp32: first within a row, then over the rows of a batch
    split, then over batch splits.
    """

    name = "sum"
    accumulates = (0,)
    signature = Signature(1)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """`[1]` fp32."""
        (x,) = inputs
        assert x is not None
        require_floats(self.name, x)
        require(x.storage in ("rows", "scalars"), self.name, "sums rows of elements", x)
        return [TensorSpec((1,), DTYPES["f32"], storage="vector")]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Everything is contracted, the batch along its batch splits; a row is not sharded."""
        assert inputs[0] is not None
        dims = _dims(inputs[0])
        rows = tuple(d for d in dims if d != "d")
        partial_values = (PartialValue("total", rows, (0,), tree=BATCH_SPLITS),)
        return Factors(
            (dims,), (("o",),), whole=frozenset(dims) - frozenset(rows), partial_values=partial_values
        )

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """dy for every element."""
        return list(tape.op("spread", [incoming(op, grads), tape.use(op.given[0])]))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """Row sums per row tile, which are added per batch split. Then the sum along the tree over
        batch splits, and the reduction over devices.
        """
        x = low.tensor(op.given[0])
        rows = low.temp(x.extent, 1, "f32", tile_rows=x.tile_rows, name="row_sums")
        low.emit("row_sum", op, over=x, dtype=x.dtype, tiles={"out": low.row(rows), "x": low.row(x)})
        split = low.split_temp(1, "split_sums")
        tiles = {"split": low.row(split, div=low.split_rows), "x": low.row(rows)}
        low.emit("row_sum_split", op, over=x, tiles=tiles, ints=low.split_cut)
        low.split_tree(op, 0, split)


@register
class Spread(Op):
    """Gives every element of a tensor the same number. Inputs are the number `[1]` in fp32, and a
    tensor x for its shape. The output has the spec of x.
    """

    name = "spread"
    in_place = ((0, 1),)
    signature = Signature(2)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x."""
        number, x = inputs
        assert number is not None and x is not None
        require_floats(self.name, x)
        is_number = number.shape == (1,) and number.dtype.name == "f32"
        require(is_number, self.name, "spreads one f32", number, x)
        return [TensorSpec(x.shape, x.dtype, x.labels, storage=x.storage)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The output is sharded like x."""
        assert inputs[1] is not None
        dims = _dims(inputs[1])
        return Factors((("o",), dims), (dims,))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile; of x only the shape is used."""
        out = low.tensor(op.outputs[0])
        tiles = {"out": low.row(out), "x": low.whole(op.given[0])}
        low.emit("spread", op, over=out, dtype=out.dtype, tiles=tiles)
