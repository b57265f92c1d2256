"""Selecting elements by index along a dim, its reverse, and one-hot rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import fixed, incoming, require
from tilewise.graph.ops.items import Items, named, require_dims, result_spec
from tilewise.ir.factors import Factors
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Bounds, Gradients, Op, Specs, operand, optional, register, result
from tilewise.ir.resolve import factors_of
from tilewise.ir.tape import Tape

__all__: list[str] = []


class _Indexed(Op):
    """Base of ops with an index along `dim`: `[n]`, or a number for every element of a result."""

    dim: int

    def _check_index(self, x: TensorSpec, index: TensorSpec, other: TensorSpec | None = None) -> None:
        require_dims(self.name, x, index, *([] if other is None else [other]))
        require(0 <= self.dim < len(x.shape), self.name, f"dim {self.dim} must be one of x", x)
        if self._is_list(x, index):
            return
        fits = len(index.shape) == len(x.shape) and all(
            a == b or d == self.dim for d, (a, b) in enumerate(zip(index.shape, x.shape))
        )
        require(
            fits, self.name, f"index must be [n], or have the sizes of x in all dims but {self.dim}", x, index
        )

    def _is_list(self, x: TensorSpec, index: TensorSpec) -> bool:
        """Whether the index is one list for all of x."""
        return len(index.shape) == 1 and len(x.shape) > 1

    def _named(self, x: TensorSpec, index: TensorSpec) -> tuple[str, str, str]:
        """Names of the dims of x, of the index, and of what has a part for every index."""
        names = named(x.shape)
        chosen = ["chosen" if d == self.dim else n for d, n in enumerate(names)]
        return " ".join(names), "chosen" if self._is_list(x, index) else " ".join(chosen), " ".join(chosen)

    def factors(self, spec: Specs) -> Factors:
        """The indexed dim is whole."""
        return replace(factors_of(self, spec), whole=frozenset({f"d{self.dim}"}))

    def _layout(self, low: Lowering, x: int, index: int, *others: int) -> tuple[Items, bool, dict[str, int]]:
        """The items, whether they share the index, and the integers of the kernels."""
        is_list = self._is_list(low.spec(x), low.spec(index))
        tensors = (x, *others) if is_list else (x, *others, index)
        items = Items.of(low, self.dim, *tensors)
        place = self.dim - items.lead
        sizes, numbers = items.sizes(x), [fixed(s) for s in low.local_sizes(index)]
        outer, inner = prod(sizes[:place]), prod(sizes[place + 1 :])
        count = numbers[0 if is_list else self.dim]
        ints = {
            "outer": outer,
            "size": sizes[place],
            "inner": inner,
            "count": count,
            "index_outer": 0 if is_list else count * inner,
            "index_step": 1 if is_list else inner,
            "index_inner": 0 if is_list else 1,
            "index_item": 0 if is_list else outer * count * inner,
        }
        return items, is_list, ints


@register
class GatherElements(_Indexed):
    """Elements of x along `dim`. With an index `[n]`, these are whole slices; otherwise the index has
    the shape of the result.
    """

    name = "gather_elements"
    x: int = operand("*", dtype="any")
    index: int = operand("*", dtype="i32")
    out: int = result("*", dtype="any")

    def check(self, spec: Specs) -> None:
        """The index fits."""
        self._check_index(spec(self.x), spec(self.index))

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """All dims but `dim` have one name."""
        x, index, out = self._named(spec(self.x), spec(self.index))
        return {"x": x, "index": index, "out": out}

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        """Places in x."""
        return {"index": (0, spec(self.x).shape[self.dim], None)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """x with as many elements along `dim` as there are indices."""
        x, index = spec(self.x), spec(self.index)
        count = index.shape[0] if self._is_list(x, index) else index.shape[self.dim]
        shape = [count if d == self.dim else n for d, n in enumerate(x.shape)]
        label = index.labels[0 if self._is_list(x, index) else self.dim]
        return [result_spec(x, shape, [label if d == self.dim else one for d, one in enumerate(x.labels)])]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy, added where the elements came from."""
        back = ScatterAdd(
            x=None, src=incoming(self, grads), index=tape.use(self.index), like=tape.use(self.x), dim=self.dim
        )
        return {"x": tape.op(back)[0]}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        items, is_list, ints = self._layout(low, self.x, self.index, self.out)
        tiles = {"out": self.out, "x": self.x} | ({} if is_list else {"index": self.index})
        items.emit(
            "gather_elements", self.out, tiles, whole={"index": self.index} if is_list else None, ints=ints
        )


@register
class ScatterAdd(_Indexed):
    """x with the elements of `src` added at their indices along `dim`, in ascending order. Without x,
    the result has the shape of `like`.
    """

    name = "scatter_add"
    x: int | None = optional("*")
    src: int = operand("*")
    index: int = operand("*", dtype="i32")
    like: int = operand("*", shape_only=True)
    out: int = result("*")

    def check(self, spec: Specs) -> None:
        """Source and index fit."""
        like, src, index = spec(self.like), spec(self.src), spec(self.index)
        self._check_index(like, index, src)
        count = index.shape[0] if self._is_list(like, index) else index.shape[self.dim]
        shape = tuple(count if d == self.dim else n for d, n in enumerate(like.shape))
        require(
            src.shape == shape, self.name, "the source must have an element for every index", src, index, like
        )
        if self.x is not None:
            x = spec(self.x)
            require(x.shape == like.shape, self.name, "x and like must have one shape", x, like)

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """All dims but `dim` have one name."""
        x, index, src = self._named(spec(self.like), spec(self.index))
        like = " ".join("like" if name == f"d{self.dim}" else name for name in x.split())
        return {"x": x, "like": like, "out": x, "index": index, "src": src}

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        """Places in the result."""
        return {"index": (0, spec(self.like).shape[self.dim], None)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The shape of x."""
        like, src = spec(self.like), spec(self.src)
        return [result_spec(src, like.shape, like.labels)]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dy for x, and its elements at the indices for the source."""
        dy = incoming(self, grads)
        taken = GatherElements(x=dy, index=tape.use(self.index), dim=self.dim)
        return {"src": tape.op(taken)[0], **({} if self.x is None else {"x": dy})}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        items, is_list, ints = self._layout(low, self.out, self.index, self.src)
        tiles = {"out": self.out, "x": self.x, "src": self.src} | ({} if is_list else {"index": self.index})
        items.emit(
            "scatter_add", self.out, tiles, whole={"index": self.index} if is_list else None, ints=ints
        )


@register
class OneHot(Op):
    """A row of `classes` elements per id: 1 at the id, else 0."""

    name = "one_hot"
    ids: int = operand("...", dtype="i32")
    classes: int
    out: int = result("... c")

    def check(self, spec: Specs) -> None:
        """There are classes."""
        ids = spec(self.ids)
        require_dims(self.name, ids)
        require(self.classes > 0, self.name, f"classes must be 1 or more, not {self.classes}", ids)

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Those of the ids."""
        names = " ".join(named(spec(self.ids).shape))
        return {"ids": names, "out": f"{names} classes"}

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        """Classes."""
        return {"ids": (0, self.classes, None)}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """f32."""
        ids = spec(self.ids)
        return [TensorSpec((*ids.shape, self.classes), DTYPES["f32"], (*ids.labels, None))]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Integers have no gradient."""
        return {}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        items = Items.of(low, len(low.spec(self.ids).shape), self.out, self.ids)
        items.emit("one_hot", self.out, {"out": self.out, "ids": self.ids}, ints={"first": 0})
