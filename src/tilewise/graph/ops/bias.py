"""Adding a trained vector to every row, and its gradient, which is a sum over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import incoming, leading, require, require_floats
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, PartialValue, Signature, register
from tilewise.ir.tape import Gradient, Tape

__all__: list[str] = []


@register
class AddBias(Op):
    """`x + bias` with x `[..., n]`, bias `[n]`. If the columns of x are sharded, so is the bias."""

    name = "add_bias"
    in_place = ((0, 0),)
    signature = Signature(2)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x."""
        x, bias = inputs
        assert x is not None and bias is not None
        require_floats(self.name, x, bias)
        require(len(x.shape) > 1 and x.storage == "rows", self.name, "x must be rows of elements", x, bias)
        require(bias.shape == x.shape[-1:], self.name, "the bias must have the size of the last dim", x, bias)
        return [TensorSpec(x.shape, x.dtype, x.labels)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The bias is sharded like the columns."""
        assert inputs[0] is not None
        x = (*leading(inputs[0]), "d")
        return Factors((x, ("d",)), (x,))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """dy, and its sum over the rows."""
        dy = incoming(op, grads)
        return [dy, tape.later("bias_gradient", [tape.use(op.given[1]), dy])]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        x, bias = op.given
        t = low.tensor(x)
        tiles = {"out": low.row(op.outputs[0]), "x": low.row(x), "bias": low.whole(bias)}
        low.emit("add_bias", op, over=t, dtype=t.dtype, tiles=tiles)


@register
class BiasGradient(Op):
    """The sum of dy over all rows, batch split by batch split, in fp32. Inputs: the bias (for its
    shape) and dy.
    """

    name = "bias_gradient"
    accumulates = (0,)
    signature = Signature(2)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """fp32 with the bias's shape."""
        bias = inputs[0]
        assert bias is not None
        return [replace(bias, dtype=DTYPES["f32"], name="")]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The rows are contracted."""
        assert inputs[1] is not None
        rows = leading(inputs[1])
        return Factors(
            (("d",), (*rows, "d")),
            (("d",),),
            partial_values=(PartialValue("rows", rows, (0,), tree=BATCH_SPLITS),),
        )

    def lower(self, low: Lowering, op: OpNode) -> None:
        """Partial values per batch split, then their sum along the tree over batch splits and the
        reduction over devices.
        """
        t = low.tensor(op.given[1])
        split = low.split_temp(t.cols, "bias_splits")
        tiles = {"split": low.row(split, div=low.split_rows), "x": low.row(t)}
        low.emit("column_sum_split", op, over=t, dtype=t.dtype, tiles=tiles, ints=low.split_cut)
        low.split_tree(op, 0, split)
