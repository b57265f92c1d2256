"""Ops that only move elements: reshape, permute, slice, pad, concat, and broadcasting.

The result is a copy. A dim that an op passes on unchanged may be sharded; others are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from tilewise.core.dims import DimLabel, Size, counts_batch
from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.bias import BiasGradient
from tilewise.graph.ops.common import incoming, require
from tilewise.graph.ops.items import (
    ElementMap,
    Items,
    leading,
    named,
    relabelled,
    require_dims,
    result_spec,
)
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Specs, operand, operands, optional, register, result
from tilewise.ir.tape import Gradient, Tape

__all__ = ["Expand", "Pad", "Permute", "RepeatRow", "Reshape", "Slice"]


def row_major(sizes: Sequence[int]) -> list[int]:
    """Strides of row-major storage."""
    return [*accumulate(reversed([*sizes[1:], 1]), lambda a, b: a * b)][::-1] if sizes else []


class _View(Op):
    """Base of ops whose result has elements of `x` in another order."""

    x: int = operand("*", dtype="any")
    out: int = result("*", dtype="any", indices_of="x")

    def check(self, spec: Specs) -> None:
        """Sizes are fixed."""
        require_dims(self.name, spec(self.x))

    def _lower(
        self, low: Lowering, elements: Callable[[int, list[int], list[int]], ElementMap], fill: int = 0
    ) -> None:
        """Copy every item; `elements` gets the number of leading dims and the sizes of an item of x
        and of the result.
        """
        dims = self.dims(low.spec)
        items = Items.of(low, leading(dims["x"], dims["out"]), self.x, self.out)
        made = elements(items.lead, items.sizes(self.x), items.sizes(self.out))
        items.rearrange(self.x, self.out, made, fill)


def _groups(source: Sequence[int], shape: Sequence[int]) -> list[tuple[range, range]]:
    """Adjacent dims of two shapes with equal products, as short as possible."""
    groups, i, j = [], 0, 0
    while i < len(source) or j < len(shape):
        first, other = i, j
        left = source[i] if i < len(source) else 1
        right = shape[j] if j < len(shape) else 1
        i, j = min(i + 1, len(source)), min(j + 1, len(shape))
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * shape[j], j + 1
        groups.append((range(first, i), range(other, j)))
    return groups


@register
class Reshape(_View):
    """The elements in the same order with other dims. If adjacent dims are merged or one is split,
    and the first of them is labelled, devices may still share it.
    """

    name = "reshape"
    source: tuple[int, ...]
    shape: tuple[int, ...]

    def check(self, spec: Specs) -> None:
        """The number of elements stays."""
        x = spec(self.x)
        require_dims(self.name, x)
        fits = x.shape == self.source and min(self.shape, default=0) > 0
        fits = fits and prod(self.source) == prod(self.shape)
        require(fits, self.name, f"must keep the number of elements, not change it to {list(self.shape)}", x)
        stays = not counts_batch(x.labels[0]) or self.shape[0] == x.shape[0]
        rule = f"dim 0, which counts the batch, must stay as it is, not become {list(self.shape)}"
        require(stays, self.name, rule, x, advice=f"reshape the other dims: [{x.shape[0]}, ...]")

    def _named(self, labels: Sequence[DimLabel | None]) -> tuple[list[str], list[str], list[DimLabel | None]]:
        """Names of the dims of x and of the result, and the result's labels."""
        left, right = named(self.source, "i"), named(self.shape, "o")
        made: list[DimLabel | None] = [None] * len(self.shape)
        for of, to in _groups(self.source, self.shape):
            if not of or not to:
                continue
            inner, outer = prod(self.source[i] for i in of[1:]), prod(self.shape[i] for i in to[1:])
            label = labels[of[0]]
            if len(of) == len(to) == 1:
                made[to[0]] = label
            else:
                made[to[0]] = label = relabelled(label, inner, outer)
            if label is not None or len(of) == len(to) == 1:
                left[of[0]], right[to[0]] = f"s{of[0]}*", f"s{of[0]}*"
        return left, right, made

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Dims that stay, or whose pieces stay whole, have one name."""
        left, right, _ = self._named(spec(self.x).labels)
        return {"x": " ".join(left), "out": " ".join(right)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The new shape."""
        x = spec(self.x)
        return [result_spec(x, self.shape, self._named(x.labels)[2])]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy in the old shape."""
        return {"x": tape.op(Reshape(x=incoming(self, grads), source=self.shape, shape=self.source))[0]}

    def lower(self, low: Lowering) -> None:
        """One copy of each item."""
        dims = self.dims(low.spec)
        shared = leading(dims["x"], dims["out"])
        while self.source[:shared] != self.shape[:shared]:
            shared -= 1
        items = Items.of(low, shared, self.x, self.out)
        items.rearrange(self.x, self.out, ElementMap([items.elements(self.x)], [1]))


@register
class Permute(_View):
    """The dims in another order: dim d of the result is dim `order[d]` of x."""

    name = "permute"
    order: tuple[int, ...]

    def check(self, spec: Specs) -> None:
        """Every dim occurs once."""
        x = spec(self.x)
        require_dims(self.name, x)
        is_order = sorted(self.order) == [*range(len(x.shape))]
        require(is_order, self.name, f"takes every dim once, not {list(self.order)}", x)
        stays = not counts_batch(x.labels[0]) or self.order[0] == 0
        rule = f"dim 0, which counts the batch, must stay the first, not in {list(self.order)}"
        require(stays, self.name, rule, x, advice="exchange other dims")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """The names in another order."""
        names = named(spec(self.x).shape)
        moved = [names[i] for i in self.order if 0 <= i < len(names)]
        return {"x": " ".join(names), "out": " ".join(moved) or "*"}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """Sizes and labels in the new order."""
        x = spec(self.x)
        return [result_spec(x, [x.shape[i] for i in self.order], [x.labels[i] for i in self.order])]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The reverse order."""
        back = tuple(self.order.index(i) for i in range(len(self.order)))
        return {"x": tape.op(Permute(x=incoming(self, grads), order=back))[0]}

    def lower(self, low: Lowering) -> None:
        """One copy of each item."""

        def elements(lead: int, source: list[int], sizes: list[int]) -> ElementMap:
            strides = row_major(source)
            return ElementMap(sizes, [strides[i - lead] for i in self.order[lead:]])

        self._lower(low, elements)


class _Resized(_View):
    """Base of ops that change the sizes of some dims, which then are whole and have no label."""

    source: tuple[int, ...]
    shape: tuple[int, ...]

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Dims that are not changed have one name."""
        names = named(self.source)
        changed = [n if s == m else f"new_{n}" for n, s, m in zip(names, self.source, self.shape)]
        return {"x": " ".join(names), "out": " ".join(changed)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The new sizes."""
        x = spec(self.x)
        labels = [label if s == m else None for label, s, m in zip(x.labels, self.source, self.shape)]
        return [result_spec(x, self.shape, labels)]


@register
class Slice(_Resized):
    """Elements `[begin, begin + shape)` of every dim."""

    name = "slice_dims"
    begin: tuple[int, ...]

    def check(self, spec: Specs) -> None:
        """The ranges lie in x."""
        x = spec(self.x)
        require_dims(self.name, x)
        fits = x.shape == self.source and len(self.begin) == len(self.shape) == len(self.source)
        fits = fits and all(
            b >= 0 and n > 0 and b + n <= s for b, n, s in zip(self.begin, self.shape, self.source)
        )
        require(
            fits, self.name, f"takes {list(self.shape)} elements from {list(self.begin)} on, inside of x", x
        )

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy, and zeros elsewhere."""
        dy = incoming(self, grads)
        return {
            "x": tape.op(Pad(x=dy, source=self.shape, before=self.begin, shape=self.source, value=0.0))[0]
        }

    def lower(self, low: Lowering) -> None:
        """One copy of each item."""

        def elements(lead: int, source: list[int], sizes: list[int]) -> ElementMap:
            strides = row_major(source)
            return ElementMap(sizes, strides, sum(b * s for b, s in zip(self.begin[lead:], strides)))

        self._lower(low, elements)


@register
class Pad(_Resized):
    """x inside of a larger tensor, from index `before` on; the other elements are `value`."""

    name = "pad"
    before: tuple[int, ...]
    value: float

    def check(self, spec: Specs) -> None:
        """x lies in the result."""
        x = spec(self.x)
        require_dims(self.name, x)
        fits = x.shape == self.source and len(self.before) == len(self.shape) == len(self.source)
        fits = fits and all(b >= 0 and b + s <= n for b, n, s in zip(self.before, self.shape, self.source))
        require(
            fits, self.name, f"puts x at {list(self.before)} of {list(self.shape)}, which must hold it", x
        )
        is_number = x.dtype.name != "i32" or self.value == int(self.value)
        require(is_number, self.name, f"the value must be a number of x's type, not {self.value}", x)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The part of dy that x has."""
        dy = incoming(self, grads)
        return {"x": tape.op(Slice(x=dy, source=self.shape, begin=self.before, shape=self.source))[0]}

    def lower(self, low: Lowering) -> None:
        """One copy of each item."""

        def elements(lead: int, source: list[int], sizes: list[int]) -> ElementMap:
            strides, before = row_major(source), self.before[lead:]
            first = -sum(b * s for b, s in zip(before, strides))
            return ElementMap(sizes, strides, first, before, [b + s for b, s in zip(before, source)])

        self._lower(low, elements, _bits(self.value, low.spec(self.x)))


def _bits(value: float, spec: TensorSpec) -> int:
    """The bits of a number in a tensor's dtype."""
    kind = DTYPES[spec.dtype.name].numpy
    return int(np.array([value]).astype(kind).view(np.uint16 if kind.itemsize == 2 else np.uint32)[0])


@register
class Concat(Op):
    """Tensors one after another along `dim`, of `lengths` elements each; `shape` is the result's."""

    name = "concat"
    x: tuple[int, ...] = operands("*", dtype="any")
    dim: int
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    out: int = result("*", dtype="any")

    def check(self, spec: Specs) -> None:
        """Sizes of the other dims agree."""
        first, *others = specs = [spec(x) for x in self.x]
        require_dims(self.name, *specs)
        is_dim = 0 <= self.dim < len(first.shape) == len(self.shape) and len(self.lengths) == len(specs)
        require(is_dim, self.name, f"dim {self.dim} must be one of x, with a length per operand", first)
        for one, length in zip(specs, self.lengths):
            sizes = [*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]]
            fits = [*one.shape] == sizes and one.dtype == first.dtype
            require(fits, self.name, "operands must have one dtype and equal other dims", first, *others)
        fits = self.shape[self.dim] == sum(self.lengths)
        require(
            fits, self.name, f"dim {self.dim} of {list(self.shape)} must be the sum of the lengths", first
        )

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """The joined dim is whole."""
        names = named(self.shape)
        own = [f"{n}*" if d == self.dim else n for d, n in enumerate(names)]
        joined = ["joined" if d == self.dim else n for d, n in enumerate(names)]
        return {"x": " ".join(own), "out": " ".join(joined)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The sum of the sizes along `dim`."""
        x = spec(self.x[0])
        labels = [None if d == self.dim else label for d, label in enumerate(x.labels)]
        return [result_spec(x, self.shape, labels)]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Each operand's part of dy."""
        dy, parts, first = incoming(self, grads), list[Gradient](), 0
        for length in self.lengths:
            begin = tuple(first if d == self.dim else 0 for d in range(len(self.shape)))
            shape = (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])
            parts += tape.op(Slice(x=dy, source=self.shape, begin=begin, shape=shape))
            first += length
        return {"x": parts}

    def lower(self, low: Lowering) -> None:
        """Runs of each operand in turn, item by item."""
        items = Items.of(low, self.dim, self.out, *self.x)
        lengths = [prod(items.sizes(x)[self.dim - items.lead :]) for x in self.x]
        items.emit("concat", self.out, {"out": self.out, "x": self.x}, ints={"length": lengths})


# ---- broadcasting ------------------------------------------------------------------------------------------


def _aligned(shape: Sequence[Size], like: Sequence[Size]) -> tuple[list[str], list[str]]:
    """Names of the dims of a tensor that is broadcast, and of the tensor that it becomes."""
    whole = named(like)
    own = whole[len(like) - len(shape) :]
    return [n if a == b else f"one_{n}" for n, a, b in zip(own, shape, like[len(like) - len(shape) :])], whole


@register
class Expand(Op):
    """x, broadcast to `shape` as in NumPy: sizes of 1 and missing leading dims are repeated. `like` has
    this shape; if it is given, devices share the result as they share `like`.
    """

    name = "expand"
    x: int = operand("*", dtype="any")
    like: int | None = optional("*", dtype="any", shape_only=True)
    shape: tuple[int, ...]
    out: int = result("*", dtype="any", indices_of="x")

    def check(self, spec: Specs) -> None:
        """Sizes are 1 or those of the result."""
        x, like = spec(self.x), None if self.like is None else spec(self.like)
        require_dims(self.name, x)
        is_like = like is None or like.shape == self.shape
        require(is_like, self.name, f"`like` must have the shape {list(self.shape)}", like)
        tail = self.shape[len(self.shape) - len(x.shape) :]
        fits = len(x.shape) <= len(self.shape) and all(a in (1, b) for a, b in zip(x.shape, tail))
        rule = f"sizes must be 1 or equal, from the last dim on, to become {list(self.shape)}"
        require(fits, self.name, rule, x)
        stays = not counts_batch(x.labels[0]) or len(self.shape) == len(x.shape)
        rule = f"dim 0, which counts the batch, must stay the first of {list(self.shape)}"
        require(stays, self.name, rule, x, advice="reshape the other operand to begin with the batch, or 1")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Those of `like`."""
        own, whole = _aligned(spec(self.x).shape, self.shape)
        names = {"x": " ".join(own), "out": " ".join(whole)}
        return names if self.like is None else {**names, "like": " ".join(whole)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The shape, with the labels of `like` or of x."""
        x = spec(self.x)
        if self.like is not None:
            return [TensorSpec(self.shape, x.dtype, spec(self.like).labels)]
        missing = len(self.shape) - len(x.shape)
        labels = [
            x.labels[d - missing] if d >= missing and x.shape[d - missing] == size else None
            for d, size in enumerate(self.shape)
        ]
        return [result_spec(x, self.shape, labels)]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The sum of dy over what was repeated."""
        return {"x": tape.later(ExpandBackward(dy=incoming(self, grads), x=tape.use(self.x)))}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        own, whole = _aligned(low.spec(self.x).shape, self.shape)
        lead = leading(" ".join(own), " ".join(whole)) if len(own) == len(whole) else 0
        items = Items.of(low, lead, self.out, self.x)
        sizes, source = items.sizes(self.out), items.sizes(self.x)
        strides = [s if n > 1 else 0 for s, n in zip(row_major(source), source)]
        strides = [0] * (len(sizes) - len(strides)) + strides
        items.rearrange(self.x, self.out, ElementMap(sizes, strides))


@register
class ExpandBackward(Op):
    """The gradient of `Expand`: the sum over the dims in which x was repeated."""

    name = "expand_backward"
    dy: int = operand("*")
    x: int = operand("*", shape_only=True)
    dx: int = result("*")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Those of dy."""
        own, whole = _aligned(spec(self.x).shape, spec(self.dy).shape)
        return {"dy": " ".join(whole), "x": " ".join(own), "dx": " ".join(own)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The shape of x."""
        x = spec(self.x)
        return [result_spec(x, x.shape, x.labels)]

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        own, whole = _aligned(low.spec(self.x).shape, low.spec(self.dy).shape)
        lead = leading(" ".join(own), " ".join(whole)) if len(own) == len(whole) else 0
        items = Items.of(low, lead, self.dx, self.dy)
        sizes = items.sizes(self.dy)
        items.emit(
            "reduce_sum",
            self.dx,
            {"out": self.dx, "x": self.dy},
            ints={
                "rank": len(sizes),
                "size": sizes,
                "stays": [int(n in own) for n in whole[items.lead :]],
            },
            floats={"factor": 1.0},
        )


@register
class RepeatRow(Op):
    """The vector x in every row of a tensor like `like`."""

    name = "repeat_row"
    x: int = operand("d", storage="vector")
    like: int = operand("... d", shape_only=True)
    out: int = result(like="like")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The sum of dy over the rows."""
        return {"x": tape.later(BiasGradient(bias=tape.use(self.x), dy=incoming(self, grads)))}

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        out = low.tensor(self.out)
        low.emit("repeat_row", over=out, dtype=out.dtype, tiles={"out": low.row(out), "x": low.whole(self.x)})
