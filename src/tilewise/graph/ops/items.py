"""Lowering of ops on tensors with any number of dims.

The leading dims that all tensors of an op share select its items, such as the elements of a batch.
A task computes a whole number of items, whose elements are contiguous in every tensor. The kernels
get the sizes of one item (native/kernels/dims.cc).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import NamedTuple

from tilewise.core.dims import Dim, DimLabel, Size
from tilewise.graph.ops.common import require
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.program import Number, NumberLike, Operand, upper

__all__ = ["MAX_DIMS", "ElementMap", "Items", "leading", "named", "require_dims", "result_spec"]

MAX_DIMS = 16  # kMaxDims of native/kernels/dims.cc


def named(shape: Sequence[Size], prefix: str = "d") -> list[str]:
    """A name for each dim."""
    return [f"{prefix}{i}" for i in range(len(shape))]


def require_dims(op: str, *specs: TensorSpec) -> None:
    """Check that tensors have fixed sizes, at most `MAX_DIMS` dims, and are stored in rows."""
    for spec in specs:
        is_fixed = all(isinstance(size, int) for size in spec.shape) and len(spec.shape) <= MAX_DIMS
        require(is_fixed, op, f"takes tensors of fixed sizes and at most {MAX_DIMS} dims", spec)
        is_rows = spec.storage in ("rows", "scalars")
        require(
            is_rows,
            op,
            "takes results, not weights or vectors",
            spec,
            advice="broadcast a vector by an arithmetic op, look a weight up by graph.embedding",
        )


def result_spec(like: TensorSpec, shape: Sequence[Size], labels: Sequence[DimLabel | None]) -> TensorSpec:
    """The spec of a result with the dtype of `like`."""
    return TensorSpec(tuple(shape), like.dtype, tuple(labels))


def leading(*dims: str) -> int:
    """How many leading dims the tensors with these names of dims share."""
    names = [text.split() for text in dims]
    shared = 0
    for column in zip(*names):
        if len({*column}) > 1:
            break
        shared += 1
    return shared


class ElementMap(NamedTuple):
    """Where the elements of an item of a result come from: element `(i_0, i_1, ...)` is element
    `first + sum(i_d * strides[d])` of the operand's item if every `i_d` lies in
    `[begins[d], ends[d])`.
    """

    sizes: Sequence[int]
    strides: Sequence[int]
    first: NumberLike = 0
    begins: Sequence[int] = ()
    ends: Sequence[int] = ()

    def merged(self) -> ElementMap:
        """The same map with as few dims as possible."""
        begins, ends = self.begins or [0] * len(self.sizes), self.ends or self.sizes
        dims: list[tuple[int, int, int, int]] = []
        for size, stride, begin, end in zip(self.sizes, self.strides, begins, ends):
            is_whole = begin <= 0 and end >= size
            if size == 1 and is_whole:
                continue
            if dims and is_whole:
                outer, outer_stride, first, last = dims[-1]
                if first <= 0 and last >= outer and outer_stride == stride * size:
                    dims[-1] = (outer * size, stride, 0, outer * size)
                    continue
            dims.append((size, stride, begin, end))
        columns = [list(column) for column in zip(*(dims or [(1, 1, 0, 1)]))]
        return ElementMap(columns[0], columns[1], self.first, columns[2], columns[3])


@dataclass(frozen=True)
class Items:
    """The items of one op on one device.

    Attributes:
        low: where instructions are emitted.
        lead: number of leading dims that all tensors share.
        count: number of items.
    """

    low: Lowering
    lead: int
    count: int

    @classmethod
    def of(cls, low: Lowering, lead: int, *tensors: int) -> Items:
        """The items of an op whose tensors share `lead` leading dims. Dims that are columns of a
        tensor belong to the item.
        """
        for tensor in tensors:
            spec = low.spec(tensor)
            rows = (
                len(spec.shape) if spec.storage == "scalars" or len(spec.shape) == 1 else len(spec.shape) - 1
            )
            lead = min(lead, rows)
        return cls(low, lead, prod(_fixed(s) for s in low.local_sizes(tensors[0])[:lead]))

    def sizes(self, tensor: int) -> list[int]:
        """Sizes of an item of a tensor on this device."""
        return [_fixed(s) for s in self.low.local_sizes(tensor)[self.lead :]]

    def elements(self, tensor: int) -> int:
        """The number of elements of an item."""
        return prod(self.sizes(tensor))

    def emit(
        self,
        kernel: str,
        out: int,
        tiles: Mapping[str, int | Sequence[int] | None],
        *,
        whole: Mapping[str, int] | None = None,
        dtype: str = "",
        ints: Mapping[str, NumberLike | Sequence[NumberLike]] | None = None,
        floats: Mapping[str, float] | None = None,
    ) -> None:
        """Emit a kernel over the items.

        Args:
            kernel: base name in the kernel table.
            out: the result that decides how many items a task has.
            tiles: the tensors that have items, by the table's names.
            whole: tensors that all items share.
            dtype: element type of the kernel; by default that of `out`.
            ints, floats: attributes by the table's names.
        """
        low, views = self.low, dict[str, Operand | list[Operand] | None]()
        rows = {t: low.tensor(t).extent.constant // self.count for t in _flat(tiles)}
        unit = lcm(*rows.values())
        is_one = self.lead == 0 or self.count == 1

        def view(tensor: int) -> Operand:
            return low.whole(tensor) if is_one else low.row(tensor, div=unit // rows[tensor])

        for name, value in tiles.items():
            if value is None or isinstance(value, int):
                views[name] = None if value is None else view(value)
            else:
                views[name] = [view(tensor) for tensor in value]
        views |= {name: low.whole(tensor) for name, tensor in (whole or {}).items()}
        per_task = max(1, upper(low.row_step(low.tensor(out))) // max(rows[out], 1))
        low.emit(
            kernel,
            over=low.one if is_one else Number(self.count * unit),
            step=0 if is_one else per_task * unit,
            dtype=dtype or low.tensor(out).dtype,
            tiles=views,
            ints=ints,
            floats=floats,
        )

    def rearrange(self, x: int, out: int, elements: ElementMap, fill: int = 0) -> None:
        """Emit the copy of elements of `x` that `elements` describes; `fill` are the bits of others."""
        merged = elements.merged()
        ints: dict[str, NumberLike | Sequence[NumberLike]] = {
            "rank": len(merged.sizes),
            "source_elements": self.elements(x),
            "first": merged.first,
            "fill": fill,
            "size": merged.sizes,
            "stride": merged.strides,
            "begin": merged.begins,
            "end": merged.ends,
        }
        self.emit("rearrange", out, {"out": out, "x": x}, ints=ints)


def _flat(tiles: Mapping[str, int | Sequence[int] | None]) -> list[int]:
    tensors: list[int] = []
    for value in tiles.values():
        if isinstance(value, int):
            tensors.append(value)
        elif value is not None:
            tensors += value
    return tensors


def _fixed(size: NumberLike | Dim) -> int:
    assert isinstance(size, int)
    return size


def relabelled(label: DimLabel | None, factor: int, divisor: int = 1) -> DimLabel | None:
    """A label whose pieces are larger by a factor, or smaller; None if they would not be whole."""
    if label is None or label.atom * factor % divisor:
        return None
    return replace(label, atom=label.atom * factor // divisor)
