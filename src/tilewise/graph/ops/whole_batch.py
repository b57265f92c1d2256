"""Ops that combine elements of the whole batch, as contrastive losses do: each element is compared with
all others.

They need all elements at once, so a step has one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.errors import PlanError
from tilewise.graph.ops.common import incoming, require
from tilewise.graph.ops.items import ElementMap, Items, require_dims
from tilewise.graph.ops.linear import lower_rows_product
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import BATCH_SPLITS, in_space
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Partial, Specs, operand, register, result
from tilewise.ir.tape import Tape

__all__: list[str] = []


@register
class GatherBatch(Op):
    """The rows `[batch, d]` of all devices, on every device. The first dim of the result does not count
    the batch.
    """

    name = "gather_batch"
    moved = "b"
    whole = "d"
    x: int = operand("b d")
    out: int = result("n d")

    def dims(self, spec: Specs) -> dict[str, str]:
        """The result has all rows."""
        return {"out": "n d"}

    def check(self, spec: Specs) -> None:
        """It has a fixed size."""
        require_dims(self.name, spec(self.x))

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The same shape."""
        x = spec(self.x)
        return [TensorSpec(x.shape, x.dtype, (None, x.labels[1]))]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The rows of dy that a device has."""
        return {"x": tape.op(OwnRows(x=incoming(self, grads), like=tape.use(self.x)))[0]}

    def lower(self, low: Lowering) -> None:
        """An all-gather along the batch; a copy if one device has it."""
        _require_one_microbatch(low, self.x)
        if in_space(low.layout(self.x)[0]):
            low.all_gather(self.x, self.out)
        else:
            items = Items.of(low, 1, self.out, self.x)
            items.rearrange(self.x, self.out, ElementMap([items.elements(self.x)], [1]))


@register
class OwnRows(Op):
    """The rows of x that belong to this device's elements of the batch, which is divided like dim 0 of
    `like`.
    """

    name = "own_rows"
    whole = "d"
    x: int = operand("n d")
    like: int = operand("b d", shape_only=True)
    out: int = result(like="like")

    def check(self, spec: Specs) -> None:
        """Both have one shape."""
        x, like = spec(self.x), spec(self.like)
        require_dims(self.name, x, like)
        require(x.shape == like.shape, self.name, "x and like must have one shape", x, like)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The rows of all devices."""
        return {"x": tape.op(GatherBatch(x=incoming(self, grads)))[0]}

    def lower(self, low: Lowering) -> None:
        """A copy."""
        _require_one_microbatch(low, self.like)
        first, (rows, width) = low.first_element(self.out, 0), low.local_sizes(self.out)
        assert isinstance(rows, int) and isinstance(width, int)
        begin = (
            first * width
            if isinstance(first, int)
            else first._replace(constant=first.constant * width, multiple=first.multiple * width)
        )
        Items.of(low, 0, self.out, self.x).rearrange(self.x, self.out, ElementMap([rows * width], [1], begin))


def _require_one_microbatch(low: Lowering, x: int) -> None:
    if low.num_microbatches > 1:
        raise PlanError(
            f"[graph.gather_batch] an op that combines the whole batch needs one microbatch; got "
            f"{low.num_microbatches} for {low.spec(x)} in {low.op.label!r}; use accumulation=1"
        )


@register
class RowsMatmul(Op):
    """Product of rows that count the batch, `[..., k]`, with a computed matrix that does not: `[k, n]`,
    or transposed `[n, k]`.
    """

    name = "rows_matmul"
    is_costly = True
    whole = "k"
    a: int = operand("... k")
    b: int = operand("k n")
    trans_b: bool
    out: int = result("... n")

    def dims(self, spec: Specs) -> dict[str, str]:
        """Those of a transposed operand."""
        return {"b": "n k"} if self.trans_b else {}

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy times the matrix, and the sum over all rows of the products of dy and a."""
        dy, a, b = incoming(self, grads), tape.use(self.a), tape.use(self.b)
        (da,) = tape.op(RowsMatmul(a=dy, b=b, trans_b=not self.trans_b))
        rows, cols = (dy, a) if self.trans_b else (a, dy)
        (db,) = tape.op(RowsMatmulGradient(rows=rows, cols=cols))
        return {"a": da, "b": tape.op(Unpack(x=db, like=b))[0]}

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        out = low.tensor(self.out)
        low.emit(
            "gemm",
            over=out,
            dtype=out.dtype,
            tiles={"out": low.row(out), "a": low.row(self.a), "b": low.whole(self.b)},
            ints={"trans_a": 0, "trans_b": self.trans_b, "accumulate": 0},
        )


@register
class RowsMatmulGradient(Op):
    """`rowsᵀ · cols` over all rows of the batch, in fp32 and in panels, batch split by batch split."""

    name = "rows_matmul_gradient"
    partial_values = (Partial("tokens", "...", "out", tree=BATCH_SPLITS),)
    rows: int = operand("... n")
    cols: int = operand("... k")
    out: int = result("n k", dtype="f32", storage="packed", accumulates=True)

    def lower(self, low: Lowering) -> None:
        """See `lower_rows_product`."""
        lower_rows_product(low, self.rows, self.cols, self.out)


@register
class Unpack(Op):
    """The rows of a matrix in panels, with the dtype of `like`."""

    name = "unpack"
    x: int = operand("n k", dtype="f32", storage="packed")
    like: int = operand("n k", shape_only=True)
    out: int = result(like="like")

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        out = low.tensor(self.out)
        tiles = {"out": low.whole(out), "x": low.whole(self.x)}
        low.emit("unpack", over=low.one, step=0, dtype=out.dtype, tiles=tiles)
