"""Dropout. Its mask depends on keys and on an element's index in the whole tensor, so it is the same on
every mesh and for any number of microbatches (docs/numerics.md, rule 11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from tilewise.core.dims import Dim
from tilewise.graph.ops.attention import require_whole_sequences
from tilewise.graph.ops.common import fixed, incoming, require
from tilewise.graph.ops.items import Items, named, require_dims
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Specs, operand, register, result
from tilewise.ir.program import NumberLike
from tilewise.ir.tape import Tape

__all__: list[str] = []


@register
class Dropout(Op):
    """`x / (1 - p)`, or 0 with probability `p`.

    The key is i32 `[batch, 4]`, or `[1, 4]` if x does not count the batch: the element's number in the
    batch, two keys, and the step, which is negative if nothing is dropped.
    """

    name = "dropout"
    x: int = operand("*")
    key: int = operand("*", dtype="i32")
    p: float
    out: int = result("*")

    def check(self, spec: Specs) -> None:
        """There is a key for each element of the batch."""
        x, key = spec(self.x), spec(self.key)
        if _is_padded(x):
            require(x.storage == "rows", self.name, "takes results, not weights or vectors", x)
            of_one = replace(x, shape=(x.shape[0], 1, *x.shape[2:]))
            require_dims(self.name, of_one, key)
            has_items = key.shape[0] == x.shape[0]
            require(
                has_items, self.name, "sequences of symbolic length must be elements of the batch", x, key
            )
        else:
            require_dims(self.name, x, key)
        require(0 <= self.p < 1, self.name, f"p must lie in [0, 1), not at {self.p}", x)
        fits = len(key.shape) == 2 and key.shape[1] == 4 and key.shape[0] in (1, x.shape[0])
        require(fits, self.name, "the key must be [batch, 4] or [1, 4]", x, key)

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Those of x; the key has the batch."""
        x, key = spec(self.x), spec(self.key)
        names = " ".join(named(x.shape))
        is_batch = key.shape[0] == x.shape[0] and key.labels[0] == x.labels[0]
        return {"x": names, "out": names, "key": "d0 fields" if is_batch else "one fields"}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """Like x."""
        x = spec(self.x)
        return [TensorSpec(x.shape, x.dtype, x.labels)]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy with the same mask."""
        return {"x": tape.op(Dropout(x=incoming(self, grads), key=tape.use(self.key), p=self.p))[0]}

    def lower(self, low: Lowering) -> None:
        """One task per item, or per tile of whole sequences of symbolic length."""
        if _is_padded(low.spec(self.x)):
            self._lower_sequences(low)
            return
        has_items = self.dims(low.spec)["key"] != "one fields"
        items = Items.of(low, 1 if has_items else 0, self.out, self.x)
        shape = [s if isinstance(s, int) else 0 for s in low.spec(self.x).shape]
        dims = range(items.lead, len(shape))
        ints: dict[str, NumberLike | Sequence[NumberLike]] = {
            "rank": max(len(dims), 1),
            "size": items.sizes(self.x) or [1],
            "first": [low.first_element(self.x, d) for d in dims] or [0],
            "stride": [prod(shape[d + 1 :]) for d in dims] or [1],
        }
        tiles, whole = {"out": self.out, "x": self.x}, {"key": self.key}
        if has_items:
            items.emit("dropout", self.out, tiles | whole, ints=ints, floats={"p": self.p})
        else:
            items.emit("dropout", self.out, tiles, whole=whole, ints=ints, floats={"p": self.p})

    def _lower_sequences(self, low: Lowering) -> None:
        """An element's index does not depend on the length, because only the sizes of later dims do."""
        require_whole_sequences(low, self.x)
        out, shape = low.tensor(self.out), low.spec(self.x).shape
        length, width = low.size(shape[1]), fixed(shape[2])
        ints: dict[str, NumberLike | Sequence[NumberLike]] = {
            "rank": 2,
            "size": [length, out.cols],
            "first": [0, low.first_element(self.x, 2)],
            "stride": [width, 1],
        }
        key = low.row(self.key, div=length)
        tiles = {"out": low.row(out), "x": low.row(self.x), "key": key}
        low.emit("dropout", over=out, dtype=out.dtype, tiles=tiles, ints=ints, floats={"p": self.p})


def _is_padded(x: TensorSpec) -> bool:
    """Whether a tensor is `[batch, seq, features]` with sequences of symbolic length."""
    return len(x.shape) == 3 and isinstance(x.shape[1], Dim)
