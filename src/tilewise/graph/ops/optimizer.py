"""The global gradient norm, and the scale with which gradients are clipped to a maximum norm.

The op runs once per step, after all microbatches, and has no gradient. If the loss or the norm is
not finite, the scale is NaN. The `update` op then leaves every tensor unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewise.graph.ops.common import fixed
from tilewise.ir.factors import Factors, PartialValue
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Draft, Lowering
from tilewise.ir.op import Op, Specs, operand, operands, register, result
from tilewise.ir.program import NumberLike

__all__: list[str] = []


_TILE_ROWS = 512  # every gradient begins at a tile of the table, so no task works on two gradients
_TASK_ROWS = 8192  # entries of one task: whole tiles


@register
class GlobalNorm(Op):
    """The norm of all gradients, and the scale that limits it. The scale is NaN if the loss or the
    norm is not finite.

    The norm is computed from a table of partial sums in fp64. The table has an entry per row and k
    split of the columns of every gradient; for a vector, an entry per element. So the entries do
    not depend on where shards begin. Every device computes the entries of its own shards. Then
    devices exchange entries, and every device adds the whole table along one tree.
    """

    name = "global_norm"
    loss: int = operand("*", dtype="f32")
    grads: tuple[int, ...] = operands("*", dtype="f32", packed=True)
    max_norm: float
    out: int = result("2", dtype="f32", storage="vector")

    def factors(self, spec: Specs) -> Factors:
        """A gradient may be sharded along its rows, and along its columns if a label cuts them into
        k splits.
        """
        factors = super().factors(spec)
        named = zip((self.loss, *self.grads), factors.inputs)
        divisible = [d for tensor, dims in named if dims for d in _divisible(spec(tensor), dims)]
        return replace(factors, partial_values=(PartialValue("squares", tuple(divisible), (0,), "or"),))

    def lower(self, low: Lowering) -> None:
        """Tasks for runs of entries, one exchange of the table, one task for the total."""
        parts: dict[object, _Part] = {}  # by form: equal layers have equal gradients
        alike: dict[tuple[int, int], _Part] = {}  # the same by identity, which is quicker to compare
        views = []
        for grad in self.grads:
            form, layout = low.spec(grad).form, low.layout(grad)
            part = alike.get((id(form), id(layout)))
            if part is None:
                part = parts.get((form, layout)) or _Part.of(low, grad)
                parts[form, layout] = alike[id(form), id(layout)] = part
            views.append((part, low.whole(low.flat(grad) if part.is_flat else grad)))
        size = sum(part.reserved for part, _ in views)
        table = low.temp(size, 1, "f64", tile_rows=_TILE_ROWS, name="squares")
        base = 0
        emitted: dict[tuple[int, int], Draft] = {}
        for part, view in views:
            for first in range(0, part.reserved, _TASK_ROWS):
                count = min(_TASK_ROWS, part.reserved - first)
                tiles = {"out": low.rows_at(table, base + first, count), "grad": view}
                like = emitted.get((id(part), first))
                if like is not None:
                    low.repeat(like, tiles)
                    continue
                ints = {**part.ints, "first_entry": first}
                emitted[id(part), first] = low.emit(
                    "square_sum", over=low.one, step=0, tiles=tiles, ints=ints
                )
            base += part.reserved
        for pending in low.pending_reductions("squares"):
            producer = low.hold(table.extent, 0, low.whole(table), f"{low.op.label}/squares")
            shared = low.temp(size, 1, "f64", tile_rows=_TILE_ROWS, name="squares_shared")
            low.all_reduce(table, shared, None, pending, step=0, producer=producer)
            table = shared
        tiles = {"out": low.whole(self.out), "squares": low.whole(table), "loss": low.whole(self.loss)}
        low.emit("norm_scale", over=low.one, step=0, tiles=tiles, floats={"max_norm": self.max_norm})


def _column_dim(spec: TensorSpec) -> int | None:
    """The dim that counts columns; None for vectors, whose elements are entries."""
    return len(spec.shape) - 1 if spec.storage in ("packed", "rows") and len(spec.shape) > 1 else None


def _divisible(spec: TensorSpec, dims: tuple[str, ...]) -> list[str]:
    """The dims, by name, that devices may share: the first, and the columns if they have k splits."""
    column = _column_dim(spec)
    return [dims[0]] if column is None or spec.labels[column] is None else [dims[0], dims[column]]


@dataclass(frozen=True)
class _Part:
    """The part of the table that belongs to gradients of one form.

    Attributes:
        is_flat: whether the gradient is a vector, which is read as a column.
        reserved: number of entries, rounded up to a whole tile.
        ints: the positions of this device's entries.
    """

    is_flat: bool
    reserved: int
    ints: Mapping[str, NumberLike | Sequence[NumberLike]]

    @classmethod
    def of(cls, low: Lowering, grad: int) -> _Part:
        """The part of the table for a gradient and all gradients of the same form."""
        spec = low.spec(grad)
        column = _column_dim(spec)
        inner = prod(fixed(size) for size in spec.shape[1:column])
        rows = fixed(spec.shape[0]) * inner
        ref = low.tensor(grad) if column is not None else low.flat(grad)
        ranges: Sequence[NumberLike] = [0, ref.cols]
        if column is not None and spec.labels[column] is not None:
            ranges = low.local_splits(grad, column)
        k_splits = len(ranges) // 2
        ints = {
            "rows": rows,
            "first_row": _times(low.first_element(grad, 0), inner),
            "num_k_splits": k_splits,
            "range": ranges,
        }
        return cls(column is None, -(-rows * k_splits // _TILE_ROWS) * _TILE_ROWS, ints)


def _times(number: NumberLike, factor: int) -> NumberLike:
    if isinstance(number, int):
        return number * factor
    return number._replace(constant=number.constant * factor, multiple=number.multiple * factor)
