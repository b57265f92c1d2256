"""The sum of all elements of a tensor, and the reverse, which gives every element of a tensor one
number.

If the tensor has a batch dim, rows are added batch split by batch split, as in the loss
(docs/numerics.md, rule 5). The sum therefore has the same bits on every mesh. It is complete after
the last microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.graph.ops.common import incoming, require
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Partial, Specs, operand, register, result
from tilewise.ir.tape import Tape

__all__: list[str] = []


def _dims(spec: TensorSpec) -> str:
    """Dims of rows of elements, or of rows of one element."""
    return "... d" if spec.storage == "rows" and len(spec.shape) > 1 else "..."


@register
class Sum(Op):
    """The sum of all elements: first within a row, then over the rows of a batch split, then over
    batch splits.
    """

    name = "sum"
    whole = "d"
    partial_values = (Partial("total", "...", "out", tree=BATCH_SPLITS),)
    x: int = operand("... d")
    out: int = result("1", dtype="f32", storage="vector", accumulates=True)

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """A row is not sharded."""
        return {"x": _dims(spec(self.x))}

    def check(self, spec: Specs) -> None:
        """It sums rows."""
        x = spec(self.x)
        require(x.storage in ("rows", "scalars"), self.name, "sums rows of elements", x)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy for every element."""
        return {"x": tape.op(Spread(x=incoming(self, grads), like=tape.use(self.x)))[0]}

    def lower(self, low: Lowering) -> None:
        """Row sums per row tile, which are added per batch split. Then the sum along the tree over
        batch splits, and the reduction over devices.
        """
        x = low.tensor(self.x)
        rows = low.temp(x.extent, 1, "f32", tile_rows=x.tile_rows, name="row_sums")
        low.emit("row_sum", over=x, dtype=x.dtype, tiles={"out": low.row(rows), "x": low.row(x)})
        split = low.split_temp(1, "split_sums")
        tiles = {"split": low.row(split, div=low.split_rows), "x": low.row(rows)}
        low.emit("row_sum_split", over=x, tiles=tiles, ints=low.split_cut)
        low.split_tree(self.out, split)


@register
class Spread(Op):
    """Gives every element of a tensor like `like` the number `x`."""

    name = "spread"
    x: int = operand("1", dtype="f32")
    like: int = operand("...")
    out: int = result(like="like", in_place="like")

    def lower(self, low: Lowering) -> None:
        """One task per row tile; of `like` only the shape is used."""
        out = low.tensor(self.out)
        low.emit("spread", over=out, dtype=out.dtype, tiles={"out": low.row(out), "x": low.whole(self.x)})
