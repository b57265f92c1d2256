"""Adding a trained vector to every row, and its gradient, which is a sum over rows."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.graph.ops.common import incoming
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Partial, operand, register, result
from tilewise.ir.tape import Tape

__all__ = ["BiasGradient"]


@register
class AddBias(Op):
    """`x + bias`. If the columns of x are sharded, so is the bias."""

    name = "add_bias"
    x: int = operand("... d")
    bias: int = operand("d")
    out: int = result(like="x", in_place="x")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy, and its sum over the rows."""
        dy = incoming(self, grads)
        return {"x": dy, "bias": tape.later(BiasGradient(bias=tape.use(self.bias), dy=dy))}


@register
class BiasGradient(Op):
    """The sum of dy over all rows, batch split by batch split, in fp32."""

    name = "bias_gradient"
    partial_values = (Partial("rows", "...", "dbias", tree=BATCH_SPLITS),)
    bias: int = operand("d", shape_only=True)
    dy: int = operand("... d")
    dbias: int = result(like="bias", dtype="f32", accumulates=True)

    def lower(self, low: Lowering) -> None:
        """Partial values per batch split, then their sum along the tree over batch splits and the
        reduction over devices.
        """
        dy = low.tensor(self.dy)
        split = low.split_temp(dy.cols, "bias_splits")
        tiles = {"split": low.row(split, div=low.split_rows), "x": low.row(dy)}
        low.emit("column_sum_split", over=dy, dtype=dy.dtype, tiles=tiles, ints=low.split_cut)
        low.split_tree(self.dbias, split)
