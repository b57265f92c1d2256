"""Sums and maxima over some dims of a tensor, the sum of all elements, and the reverse of that, which
gives every element of a tensor one number.

If the tensor has a batch dim, rows are added batch split by batch split, as in the loss
(docs/numerics.md, rule 5). The sum therefore has the same bits on every mesh. It is complete after
the last microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.graph.ops.arithmetic import Divide, Equal
from tilewise.graph.ops.common import incoming, require
from tilewise.graph.ops.items import Items, leading, named, require_dims, result_spec
from tilewise.graph.ops.views import Expand, RepeatRow, Reshape
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Partial, Specs, operand, register, result
from tilewise.ir.program import NumberLike
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

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The sum of dy."""
        return {"x": tape.later(Sum(x=incoming(self, grads)))}

    def lower(self, low: Lowering) -> None:
        """One task per row tile; of `like` only the shape is used."""
        out = low.tensor(self.out)
        low.emit("spread", over=out, dtype=out.dtype, tiles={"out": low.row(out), "x": low.whole(self.x)})


class _Reduction(Op):
    """Base of reductions over `axes`, which the result does not have. The other dims may be sharded."""

    x: int = operand("*")
    axes: tuple[int, ...]
    source: tuple[int, ...]
    out: int = result("*")

    def _widened(self, tape: Tape, x: int) -> int:
        """A tensor like the result, repeated along the reduced dims."""
        left = tuple(n for d, n in enumerate(self.source) if d not in self.axes)
        ones = tuple(1 if d in self.axes else n for d, n in enumerate(self.source))
        (wide,) = tape.op(Reshape(x=x, source=left, shape=ones))
        return tape.op(Expand(x=wide, like=tape.use(self.x), shape=self.source))[0]

    def check(self, spec: Specs) -> None:
        """The dims exist, and one is left."""
        x = spec(self.x)
        require_dims(self.name, x)
        fits = sorted({*self.axes}) == [*self.axes] and all(0 <= d < len(x.shape) for d in self.axes)
        fits = fits and 0 < len(self.axes) < len(x.shape)
        require(fits, self.name, f"axes {list(self.axes)} must be ascending dims of x, and leave one", x)

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Those that are left keep their names."""
        names = named(spec(self.x).shape)
        left = [n for d, n in enumerate(names) if d not in self.axes]
        return {"x": " ".join(names), "out": " ".join(left) or "*"}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The dims that are left."""
        x = spec(self.x)
        left = [d for d in range(len(x.shape)) if d not in self.axes]
        return [result_spec(x, [x.shape[d] for d in left], [x.labels[d] for d in left])]

    def _items(self, low: Lowering) -> tuple[Items, dict[str, NumberLike | Sequence[NumberLike]]]:
        dims = self.dims(low.spec)
        items = Items.of(low, leading(dims["x"], dims["out"]), self.x, self.out)
        sizes = items.sizes(self.x)
        stays = [int(d + items.lead not in self.axes) for d in range(len(sizes))]
        return items, {"rank": len(sizes), "size": sizes, "stays": stays}


@register
class ReduceSum(_Reduction):
    """The sum over some dims, times a factor."""

    name = "reduce_sum"
    factor: float

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy, times the factor, for every element."""
        dy = tape.scale(incoming(self, grads), self.factor) if self.factor != 1.0 else incoming(self, grads)
        return {"x": self._widened(tape, dy)}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        items, ints = self._items(low)
        tiles = {"out": self.out, "x": self.x}
        items.emit("reduce_sum", self.out, tiles, ints=ints, floats={"factor": self.factor})


@register
class ReduceMax(_Reduction):
    """The maximum over some dims. Equal maxima share the gradient."""

    name = "reduce_max"

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy, divided among the elements that are the maximum."""
        (mask,) = tape.op(Equal(a=tape.use(self.x), b=self._widened(tape, tape.use(self.out))))
        (count,) = tape.op(ReduceSum(x=mask, axes=self.axes, factor=1.0, source=self.source))
        (share,) = tape.op(Divide(a=incoming(self, grads), b=count))
        return {"x": tape.multiply(mask, self._widened(tape, share))}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        items, ints = self._items(low)
        items.emit("reduce_max", self.out, {"out": self.out, "x": self.x}, ints=ints)


@register
class BatchSum(Op):
    """The sum over all rows of a tensor, in fp32: first within a batch split, then over batch splits."""

    name = "batch_sum"
    partial_values = (Partial("rows", "...", "out", tree=BATCH_SPLITS),)
    x: int = operand("... d")
    out: int = result("d", dtype="f32", storage="vector", accumulates=True)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy for every row."""
        return {"x": tape.op(RepeatRow(x=incoming(self, grads), like=tape.use(self.x)))[0]}

    def lower(self, low: Lowering) -> None:
        """Partial values per batch split, then their sum along the tree over batch splits and the
        reduction over devices.
        """
        x = low.tensor(self.x)
        split = low.split_temp(x.cols, "row_splits")
        tiles = {"split": low.row(split, div=low.split_rows), "x": low.row(x)}
        low.emit("column_sum_split", over=x, dtype=x.dtype, tiles=tiles, ints=low.split_cut)
        low.split_tree(self.out, split)
