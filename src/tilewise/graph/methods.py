"""`TensorMethods`: the calls of `GraphBuilder` on tensors of any shape. They broadcast, choose ops by
shape, and compose ops.

Names and defaults are those of PyTorch, where PyTorch has the call. Sizes are fixed, unless a call
says otherwise. Dims may be counted from the end: -1 is the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tilewise.core.dims import MAX_SIZE, DimLabel, counts_batch
from tilewise.core.dtypes import MAX_F32
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator, shown
from tilewise.graph.declarations import Declarations, is_dropout_key
from tilewise.ir.graph import TensorNode, TensorSpec

__all__ = ["Operand", "TensorMethods", "fixed_sizes"]

Operand = TensorNode | float
"""A tensor of the graph, or a number."""

Dims = int | Sequence[int] | None
"""A dim, some dims, or None for all."""

_validate = Validator("graph", ShapeError)


class TensorMethods(Declarations):
    """The part of `GraphBuilder` for tensors of any shape."""

    # ---- arithmetic ---------------------------------------------------------------------------------------

    def add(self, a: Operand, b: Operand) -> TensorNode:
        """`a + b`. Shapes are broadcast as in NumPy. Vectors and weights may be broadcast over the batch."""
        return self._arithmetic("add", a, b)

    def sub(self, a: Operand, b: Operand) -> TensorNode:
        """`a - b`, broadcast like `add`."""
        return self._arithmetic("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> TensorNode:
        """`a * b`, broadcast like `add`."""
        return self._arithmetic("mul", a, b)

    def div(self, a: Operand, b: Operand) -> TensorNode:
        """`a / b`, broadcast like `add`. Division by a number multiplies by its reciprocal."""
        return self._arithmetic("div", a, b)

    def maximum(self, a: Operand, b: Operand) -> TensorNode:
        """The larger of two elements, broadcast like `add`; NaN if one is NaN."""
        return self._binary("maximum", a, b)

    def minimum(self, a: Operand, b: Operand) -> TensorNode:
        """The smaller of two elements, broadcast like `add`; NaN if one is NaN."""
        return self._binary("minimum", a, b)

    def greater(self, a: Operand, b: Operand) -> TensorNode:
        """1 where `a > b`, else 0, in the dtype of the operands; it has no gradient."""
        return self._binary("greater", a, b)

    def equal(self, a: Operand, b: Operand) -> TensorNode:
        """1 where `a == b`, else 0, in the dtype of the operands; it has no gradient. Tensors of i32 are
        compared with a number, and the result is f32.
        """
        if isinstance(a, TensorNode) and a.spec.dtype.name == "i32" and isinstance(b, int):
            return self.op("equal_to", [a], value=b)[0]
        return self._binary("equal", a, b)

    def where(self, mask: TensorNode, a: Operand, b: Operand) -> TensorNode:
        """`a` where the mask is not 0, `b` where it is 0; broadcast like `add`."""
        with self.all_or_nothing():
            a, b = self._pair("where", *self._tensors("where", a, b))
            mask, a = self._pair("where", mask, a)
            mask, b = self._pair("where", mask, b)
            return self.op("select", [mask, a, b])[0]

    def sigmoid(self, x: TensorNode) -> TensorNode:
        """`1 / (1 + exp(-x))`."""
        return self.op("sigmoid", [x])[0]

    def exp(self, x: TensorNode) -> TensorNode:
        """`e ** x`."""
        return self.op("exp", [x])[0]

    def log(self, x: TensorNode) -> TensorNode:
        """The natural logarithm."""
        return self.op("log", [x])[0]

    def sqrt(self, x: TensorNode) -> TensorNode:
        """The square root."""
        return self.op("sqrt", [x])[0]

    def abs(self, x: TensorNode) -> TensorNode:
        """The absolute value; the slope at 0 is 0."""
        return self.op("abs", [x])[0]

    def pow(self, x: TensorNode, exponent: float) -> TensorNode:
        """`x ** exponent`. Multiples of 1/2 up to 64 are products and roots; other exponents need
        `x >= 0`, and have an error of about 1e-7 times `exponent * log(x)`.
        """
        exponent = _validate.number("pow", "exponent", exponent, -MAX_F32, MAX_F32)
        return self.op("power", [x], exponent=exponent)[0]

    def _arithmetic(self, call: str, a: Operand, b: Operand) -> TensorNode:
        """Arithmetic on tensors and numbers."""
        name = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}[call]
        if isinstance(a, TensorNode) and isinstance(b, TensorNode):
            return self._binary(name, a, b)
        if isinstance(a, TensorNode):
            number = _number(call, b)
            if call in ("add", "sub"):
                return self.op("shift", [a], value=number if call == "add" else -number)[0]
            if call == "div" and number == 0:
                _validate.invalid(call, "a divisor must not be 0", "0", "correct it")
            return self.op("scale", [a], factor=number if call == "mul" else 1.0 / number)[0]
        number = _number(call, a)
        if not isinstance(b, TensorNode):
            _validate.invalid(call, "an operand must be a tensor", shown(b), "pass one of the graph")
        if call in ("add", "mul"):
            return self._arithmetic(call, b, number)
        with self.all_or_nothing():
            if call == "sub":
                return self.op("shift", self.op("scale", [b], factor=-1.0), value=number)[0]
            return self.op("scale", self.op("power", [b], exponent=-1.0), factor=number)[0]

    def _tensors(self, call: str, a: Operand, b: Operand) -> tuple[TensorNode, TensorNode]:
        """The operands, with a number as a constant."""
        if isinstance(a, TensorNode) and isinstance(b, TensorNode):
            return a, b
        if not isinstance(a, TensorNode) and not isinstance(b, TensorNode):
            _validate.invalid(call, "an operand must be a tensor", shown(a), "pass one of the graph")
        number = np.float32(_number(call, b if isinstance(a, TensorNode) else a))
        name = f"number.{number!s}"
        made = self.draft.tensors[self.draft.names[name]] if name in self.draft.names else None
        made = self.constant(np.full(1, number), name=name) if made is None else made
        like = a if isinstance(a, TensorNode) else b
        assert isinstance(like, TensorNode)
        if like.spec.dtype.name == "bf16":
            made = self.op("cast", [made], dtype="bf16")[0]
        return (like, made) if like is a else (made, like)

    def _binary(self, name: str, one: Operand, other: Operand) -> TensorNode:
        a, b = self._tensors(name, one, other)
        if a.spec.form[0] == b.spec.form[0] and a.spec.storage == b.spec.storage:  # the usual case
            return self.op(name, [a, b])[0]
        with self.all_or_nothing():
            return self.op(name, self._pair(name, a, b))[0]

    # ---- products -----------------------------------------------------------------------------------------

    def matmul(
        self,
        a: TensorNode,
        b: TensorNode,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        residual: TensorNode | None = None,
    ) -> TensorNode:
        """`a @ b`, where `trans_a` and `trans_b` transpose the last two dims of an operand.

        Leading dims are broadcast as in NumPy. `residual` is added to the product. One operand may be
        a parameter; products of parameters are not supported. A contraction of two results is never
        split among devices; that of a labelled dim of a parameter may be.

        Raises:
            ShapeError: inner sizes or dtypes differ.
        """
        one, other = self.draft.own("matmul", a), self.draft.own("matmul", b)
        if other.kind == "parameter" and not trans_a:
            return self.op(
                self._product_with(other.spec, trans_b), [a, b, residual, None], transpose=trans_b
            )[0]
        with self.all_or_nothing():
            if other.kind == "parameter":
                return self.matmul(self.transpose(a), b, trans_b=trans_b, residual=residual)
            if one.kind == "parameter":  # (bᵀ aᵀ)ᵀ
                rows = b if trans_b else self.transpose(b)
                op = self._product_with(one.spec, not trans_a)
                out = self.transpose(self.op(op, [rows, a, None, None], transpose=not trans_a)[0])
            else:
                out = self._product(a, b, trans_a, trans_b)
            return out if residual is None else self.add(out, residual)

    def _product_with(self, weight: TensorSpec, transpose: bool) -> str:
        """The op that multiplies with a weight."""
        is_grouped = self.quantized_matmul == "grouped" and transpose
        has_groups = weight.format is not None and weight.format.has_grouped_product
        return "linear_grouped" if is_grouped and has_groups else "linear"

    def _product(self, a: TensorNode, b: TensorNode, trans_a: bool, trans_b: bool) -> TensorNode:
        """The product of two results."""
        is_batch, ranks = counts_batch(a.spec.labels[0]), (len(a.shape), len(b.shape))
        if ranks[1] == 2 and is_batch and not (trans_a and ranks[0] == 2):
            a = self.transpose(a) if trans_a else a
            return self.op("rows_matmul", [a, b], trans_b=trans_b)[0]
        if max(ranks) <= 2:
            return self.op("matmul", [a, b], trans_a=trans_a, trans_b=trans_b)[0]
        if min(ranks) < 2:
            _validate.invalid(
                "matmul", "operands must have two dims or more", f"{a.spec}, {b.spec}", "reshape them"
            )
        if a.shape[:-2] != b.shape[:-2]:
            try:
                lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[arg-type]
            except (TypeError, ValueError):
                _validate.invalid(
                    "matmul", "leading dims must broadcast", f"{a.spec}, {b.spec}", "reshape them"
                )
            a, b = (self.expand(x, (*lead, *fixed_sizes("matmul", x.shape)[-2:])) for x in (a, b))
        return self.op("batched_matmul", [a, b], trans_a=trans_a, trans_b=trans_b)[0]

    # ---- broadcasting -------------------------------------------------------------------------------------

    def expand(self, x: TensorNode, shape: Sequence[int]) -> TensorNode:
        """x, broadcast to a shape as in NumPy."""
        sizes = fixed_sizes("expand", shape)
        return (
            x if self.draft.own("expand", x).shape == sizes else self.op("expand", [x, None], shape=sizes)[0]
        )

    def expand_as(self, x: TensorNode, like: TensorNode) -> TensorNode:
        """x, broadcast to the shape of `like`, as operands of `add` are. x may be a vector or a weight."""
        with self.all_or_nothing():
            made, _ = self._pair("expand_as", x, like)
            if made.shape != self.draft.own("expand_as", like).shape:
                rule = "the shape of x must broadcast to that of `like`"
                _validate.invalid("expand_as", rule, f"{x.spec}, {like.spec}", "exchange them")
            return made

    def _pair(self, call: str, a: TensorNode, b: TensorNode) -> list[TensorNode]:
        """Two tensors, broadcast to one shape."""
        one, other = self.draft.own(call, a).spec, self.draft.own(call, b).spec
        if one.shape == other.shape and "packed" not in (one.storage, other.storage):
            return [a, b] if one.storage == other.storage else [self._as_rows(a), self._as_rows(b)]
        if one.storage in ("vector", "packed"):
            return [self._in_rows(call, a, b), b]
        if other.storage in ("vector", "packed"):
            return [a, self._in_rows(call, b, a)]
        try:
            shape = np.broadcast_shapes(fixed_sizes(call, one.shape), fixed_sizes(call, other.shape))
        except ValueError:
            _validate.invalid(
                call,
                "a and b must have one shape, or shapes that NumPy would broadcast",
                f"{one}, {other}",
                "reshape one of them",
            )
        if other.shape == shape:
            return [self.op("expand", [a, b], shape=shape)[0], b]
        if one.shape != shape:
            a = self.op("expand", [a, None], shape=shape)[0]
        return [a, self.op("expand", [b, a], shape=shape)[0]]

    def _as_rows(self, x: TensorNode) -> TensorNode:
        """x in rows, if it has one number per row."""
        if x.spec.storage != "scalars":
            return x
        sizes = fixed_sizes("reshape", x.shape)
        return self._reshape(x, sizes, sizes)

    def _in_rows(self, call: str, x: TensorNode, like: TensorNode) -> TensorNode:
        """A vector or weight, repeated for a tensor in rows."""
        spec, shape = x.spec, like.shape
        if like.spec.storage in ("vector", "packed") or (spec.storage == "packed" and len(shape) < 2):
            _validate.invalid(
                call,
                "a vector or weight is broadcast to a result with rows",
                f"{spec} {spec.name!r}, {like.spec}",
                "give both operands one shape",
            )
        if spec.storage == "vector":
            if spec.shape == shape[-1:]:
                return self.op("repeat_row", [x, like])[0]
            if spec.shape == (1,):
                if spec.dtype.name == "f32":
                    return self.op("spread", [x, like])[0]
                column = self.op("repeat_row", [x, self.slice(like, -1, 0, 1)])[0]
                return self.op("expand", [column, like], shape=fixed_sizes(call, shape))[0]
        else:
            rows, cols = spec.shape
            fits = rows in (1, shape[-2]) and cols in (1, shape[-1])
            if fits:
                ids = self._row_numbers(fixed_sizes(call, shape[:-1]), like.spec.labels[:-1], rows == 1)
                wide = self.op("embedding", [ids, x])[0]
                return wide if cols == shape[-1] else self.op("expand", [wide, like], shape=shape)[0]
        _validate.invalid(
            call,
            "a and b must have one shape, or shapes that NumPy would broadcast",
            f"{spec} {spec.name!r}, {like.spec}",
            "reshape one of them",
        )

    def _row_numbers(
        self, shape: tuple[int, ...], labels: Sequence[DimLabel | None], are_zero: bool
    ) -> TensorNode:
        """The index along the last dim for each element of a shape, or zeros, as a constant."""
        name = f"rows.{'x'.join(map(str, shape))}{'.zero' if are_zero else ''}"
        if labels[0] is not None:
            name += f".{labels[0].name}"
        if name in self.draft.names:
            return self.draft.tensors[self.draft.names[name]]
        numbers = np.zeros(shape[-1], np.int32) if are_zero else np.arange(shape[-1], dtype=np.int32)
        value = np.ascontiguousarray(np.broadcast_to(numbers, shape))
        is_batch = counts_batch(labels[0])
        own = [labels[0] if is_batch else None, *[None] * (len(shape) - 1)]
        return self.constant(value, name=name, labels=own, storage="scalars")

    # ---- shapes -------------------------------------------------------------------------------------------

    def reshape(self, x: TensorNode, shape: Sequence[int]) -> TensorNode:
        """The elements in the same order with another shape; one size may be -1, which stands for what is
        left. Devices keep sharing a labelled dim whose pieces stay whole, such as heads that are
        split off.
        """
        source = fixed_sizes("reshape", self.draft.own("reshape", x).shape)
        sizes = [_validate.integer("reshape", "a size", size, -1, MAX_SIZE) for size in shape]
        if sizes.count(-1) == 1:
            left = prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = prod(source) // max(left, 1)
        if min(sizes, default=0) < 1 or prod(sizes) != prod(source):
            _validate.invalid(
                "reshape",
                "a shape must have as many elements as the tensor",
                f"{list(shape)} for {x.spec}",
                "correct it",
            )
        return self._reshaped(x, tuple(sizes))

    def _reshaped(self, x: TensorNode, shape: tuple[int, ...]) -> TensorNode:
        before = self._operand_of("reshape", x)
        x = before if before is not None else x
        source = fixed_sizes("reshape", x.shape)
        return x if source == shape and before is not None else self._reshape(x, source, shape)

    def _reshape(self, x: TensorNode, source: tuple[int, ...], shape: tuple[int, ...]) -> TensorNode:
        if source == shape and x.spec.storage == "rows":
            return x
        return self.op("reshape", [x], source=source, shape=shape)[0]

    def _operand_of(self, name: str, x: TensorNode) -> TensorNode | None:
        """The operand of the op of this name that computes x; None if another op does."""
        node = self.draft.ops[x.producer] if x.producer is not None else None
        if node is None or node.op != name or node.inputs[0] is None:
            return None
        return self.draft.tensors[node.inputs[0]]

    def permute(self, x: TensorNode, order: Sequence[int]) -> TensorNode:
        """The dims in another order: dim d of the result is dim `order[d]` of x."""
        rank = len(self.draft.own("permute", x).shape)
        dims = [_dim("permute", d, rank) for d in order]
        if sorted(dims) != [*range(rank)]:
            _validate.invalid("permute", "an order must have every dim once", f"{list(order)}", "correct it")
        before = self._operand_of("permute", x)
        if before is not None and x.producer is not None:
            inner = self.draft.ops[x.producer].attrs["order"]
            x, dims = before, [inner[d] for d in dims]
        return x if dims == [*range(rank)] else self.op("permute", [x], order=tuple(dims))[0]

    def transpose(self, x: TensorNode, dim0: int = -2, dim1: int = -1) -> TensorNode:
        """x with two dims exchanged."""
        rank = len(self.draft.own("transpose", x).shape)
        order = [*range(rank)]
        a, b = _dim("transpose", dim0, rank), _dim("transpose", dim1, rank)
        order[a], order[b] = b, a
        return self.permute(x, order)

    def slice(self, x: TensorNode, dim: int, start: int = 0, stop: int | None = None) -> TensorNode:
        """Elements `[start, stop)` of a dim; negative numbers count from its end."""
        sizes = fixed_sizes("slice", self.draft.own("slice", x).shape)
        at = _dim("slice", dim, len(sizes))
        size = sizes[at]
        begin = _validate.integer("slice", "start", start, -size, size)
        end = size if stop is None else _validate.integer("slice", "stop", stop, -size, size)
        begin, end = begin % size if begin < 0 else begin, end % size if end < 0 else end
        if begin >= end:
            _validate.invalid(
                "slice", "a slice must have elements", f"[{start}, {stop}) of {size}", "correct it"
            )
        if (begin, end) == (0, size):
            return x
        first = tuple(begin if d == at else 0 for d in range(len(sizes)))
        shape = tuple(end - begin if d == at else n for d, n in enumerate(sizes))
        return self.op("slice_dims", [x], source=sizes, begin=first, shape=shape)[0]

    def index(self, x: TensorNode, index: Any) -> TensorNode:
        """`x[index]`: integers, slices with a step of 1, `...` and `None`, as in NumPy."""
        parts = index if isinstance(index, tuple) else (index,)
        rank = len(self.draft.own("index", x).shape)
        named = sum(part is not None and part is not Ellipsis for part in parts)
        if named > rank or sum(part is Ellipsis for part in parts) > 1:
            _validate.invalid("index", f"an index may name {rank} dims", shown(index), "drop some")
        if Ellipsis not in parts:
            parts = (*parts, Ellipsis)
        place = parts.index(Ellipsis)
        parts = (*parts[:place], *[slice(None)] * (rank - named), *parts[place + 1 :])
        shape: list[int] = []
        with self.all_or_nothing():
            at = 0
            for part in parts:
                if part is None:
                    shape.append(1)
                    continue
                size = x.shape[at]
                if isinstance(part, slice):
                    if part.step not in (None, 1):
                        _validate.invalid(
                            "index", "a slice must have a step of 1", shown(part), "use index_select"
                        )
                    if part != slice(None):
                        x = self._part(x, at, part)
                    shape.append(x.shape[at])  # type: ignore[arg-type]
                else:
                    length = fixed_sizes("index", [size])[0]
                    first = _validate.integer("index", "an index", part, -length, length - 1) % length
                    x = self.slice(x, at, first, first + 1)
                at += 1
            if not shape:
                _validate.invalid("index", "an index must leave a dim", shown(index), "use a slice")
            return x if [*x.shape] == shape else self._reshaped(x, fixed_sizes("index", shape))

    def _part(self, x: TensorNode, dim: int, part: Any) -> TensorNode:
        """A slice of a dim, whose ends are limited to the dim as in NumPy."""
        size = fixed_sizes("index", [x.shape[dim]])[0]
        ends = (
            _validate.integer("index", "an end", e, -MAX_SIZE, MAX_SIZE)
            for e in (part.start or 0, size if part.stop is None else part.stop)
        )
        first, last, _ = slice(*ends).indices(size)
        if first >= last:
            _validate.invalid("index", "a slice must have elements", f"{shown(part)} of {size}", "correct it")
        return self.slice(x, dim, first, last)

    def split(self, x: TensorNode, sizes: int | Sequence[int], dim: int = 0) -> list[TensorNode]:
        """Parts of x along a dim: of these sizes, or of one size each (the last one may be smaller)."""
        whole = fixed_sizes("split", self.draft.own("split", x).shape)
        at = _dim("split", dim, len(whole))
        if isinstance(sizes, int):
            step = _validate.integer("split", "a size", sizes, 1, MAX_SIZE)
            sizes = [min(step, whole[at] - first) for first in range(0, whole[at], step)]
        parts = [_validate.integer("split", "a size", size, 1, MAX_SIZE) for size in sizes]
        if sum(parts) != whole[at]:
            rule = f"sizes must add up to {whole[at]}"
            _validate.invalid("split", rule, f"{list(sizes)}", "correct them")
        with self.all_or_nothing():
            ends = np.cumsum(parts).tolist()
            return [self.slice(x, at, end - size, end) for end, size in zip(ends, parts)]

    def concat(self, tensors: Sequence[TensorNode], dim: int = 0) -> TensorNode:
        """Tensors one after another along a dim; their other sizes are equal."""
        parts = [
            self.draft.own("concat", t) for t in _validate.sequence("concat", "tensors", tensors, "tensors")
        ]
        if not parts:
            _validate.invalid("concat", "there must be a tensor", "none", "pass at least one")
        shapes = [fixed_sizes("concat", t.shape) for t in parts]
        at = _dim("concat", dim, len(shapes[0]))
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            got = ", ".join(str(t.spec) for t in parts)
            _validate.invalid("concat", "tensors must have one number of dims", got, "reshape them")
        lengths = tuple(shape[at] for shape in shapes)
        shape = tuple(sum(lengths) if d == at else n for d, n in enumerate(shapes[0]))
        return (
            parts[0] if len(parts) == 1 else self.op("concat", parts, dim=at, lengths=lengths, shape=shape)[0]
        )

    def pad(self, x: TensorNode, widths: Mapping[int, tuple[int, int]], value: float = 0.0) -> TensorNode:
        """x with elements of `value` around it: `{dim: (before, after)}`."""
        source = fixed_sizes("pad", self.draft.own("pad", x).shape)
        before, shape = [0] * len(source), [*source]
        if not isinstance(widths, Mapping):
            _validate.invalid(
                "pad", "widths must be a dictionary", shown(widths), "pass {dim: (before, after)}"
            )
        for dim, width in widths.items():
            at = _dim("pad", dim, len(source))
            first, last = (_validate.integer("pad", "a width", n, 0, MAX_SIZE) for n in width)
            before[at], shape[at] = first, first + source[at] + last
        number = _validate.number("pad", "value", value, -MAX_F32, MAX_F32)
        if shape == [*source]:
            return x
        attrs = {"source": source, "before": tuple(before), "shape": tuple(shape)}
        return self.op("pad", [x], value=number, **attrs)[0]

    # ---- reductions ---------------------------------------------------------------------------------------

    def sum(self, x: TensorNode, dim: Dims = None, *, keepdim: bool = False) -> TensorNode:
        """The sum over some dims.

        Without `dim`, the sum of all elements over the whole batch: `[1]` in f32, which may be scaled,
        added, and be a loss. It includes every row, also padding; only cross-entropy ignores
        padding. A sum over the batch and other dims is f32 and may leave one dim.
        """
        return self._total("sum", x, dim, keepdim)

    def mean(self, x: TensorNode, dim: Dims = None, *, keepdim: bool = False) -> TensorNode:
        """The mean over some dims, like `sum`; without `dim`, `[1]` in f32."""
        return self._total("mean", x, dim, keepdim)

    def _total(self, call: str, x: TensorNode, dim: Dims, keepdim: bool) -> TensorNode:
        spec = self.draft.own(call, x).spec
        keepdim = _validate.truth(call, "keepdim", keepdim)
        axes = _axes(call, dim, len(spec.shape))
        if call == "mean" and not all(isinstance(spec.shape[d], int) for d in axes):
            _validate.invalid("mean", "a mean needs fixed sizes", f"{spec}", "sum it, and scale the sum")
        count = prod(n for d in axes if isinstance(n := spec.shape[d], int))
        factor = 1.0 / count if call == "mean" else 1.0
        is_batch = 0 in axes and counts_batch(spec.labels[0])
        with self.all_or_nothing():
            if len(axes) == len(spec.shape):
                if keepdim:
                    rule = "a sum over everything is [1], without other dims"
                    _validate.invalid(call, rule, "keepdim=True", "leave it out")
                total = self.op("sum", [x])[0]
                return total if factor == 1.0 else self.op("scale", [total], factor=factor)[0]
            if not is_batch:
                source = fixed_sizes(call, spec.shape)
                total = self.op("reduce_sum", [x], axes=axes, factor=factor, source=source)[0]
                return self._kept(total, source, axes) if keepdim else total
            if keepdim or len(spec.shape) - len(axes) > 1:
                _validate.invalid(
                    call,
                    "a sum over the batch and other dims may leave one dim",
                    f"dims {list(axes)} of {spec}",
                    "reshape the tensor first",
                )
            inner = tuple(d for d in axes if d > 0)
            rows = self.sum(x, inner) if inner else x
            total = self.op("batch_sum", [rows])[0]
            return total if factor == 1.0 else self.op("scale", [total], factor=factor)[0]

    def max(self, x: TensorNode, dim: int | Sequence[int], *, keepdim: bool = False) -> TensorNode:
        """The maximum over some dims, which must not count the batch; NaN if an element is NaN. Equal
        maxima share the gradient.
        """
        source = fixed_sizes("max", self.draft.own("max", x).shape)
        keepdim = _validate.truth("max", "keepdim", keepdim)
        axes = _axes("max", dim, len(source))
        with self.all_or_nothing():
            if len(axes) == len(source):
                x, source, axes = self._reshaped(x, (1, *source)), (1, *source), tuple(d + 1 for d in axes)
            top = self.op("reduce_max", [x], axes=axes, source=source)[0]
            return self._kept(top, source, axes) if keepdim else top

    def _kept(self, x: TensorNode, source: tuple[int, ...], axes: tuple[int, ...]) -> TensorNode:
        return self._reshaped(x, tuple(1 if d in axes else n for d, n in enumerate(source)))

    def softmax(self, x: TensorNode, dim: int = -1) -> TensorNode:
        """Softmax over a dim."""
        return self._over_last("softmax", x, dim)

    def log_softmax(self, x: TensorNode, dim: int = -1) -> TensorNode:
        """The logarithm of softmax over a dim."""
        return self._over_last("log_softmax", x, dim)

    def _over_last(self, name: str, x: TensorNode, dim: int) -> TensorNode:
        rank = len(self.draft.own(name, x).shape)
        at = _dim(name, dim, rank)
        if at == rank - 1:
            return self.op(name, [x])[0]
        with self.all_or_nothing():
            return self.transpose(self.op(name, [self.transpose(x, at, -1)])[0], at, -1)

    # ---- indices ------------------------------------------------------------------------------------------

    def index_select(self, x: TensorNode, dim: int, index: TensorNode) -> TensorNode:
        """The slices of x at `index` (i32 `[n]`) along a dim."""
        rank = len(self.draft.own("index_select", x).shape)
        if len(self.draft.own("index_select", index).shape) != 1:
            _validate.invalid("index_select", "an index must be [n]", f"{index.spec}", "use gather")
        return self.op("gather_elements", [x, index], dim=_dim("index_select", dim, rank))[0]

    def gather(self, x: TensorNode, dim: int, index: TensorNode) -> TensorNode:
        """Elements of x along a dim: with dim 1 of three, `out[i, j, k] = x[i, index[i, j, k], k]`. The
        index (i32) has the sizes of x in all other dims.
        """
        rank = len(self.draft.own("gather", x).shape)
        return self.op("gather_elements", [x, index], dim=_dim("gather", dim, rank))[0]

    def scatter_add(self, x: TensorNode, dim: int, index: TensorNode, src: TensorNode) -> TensorNode:
        """x with the elements of `src` added at their indices along a dim, in ascending order: the reverse
        of `gather`, or with an index `[n]` of `index_select`. Sums are in fp32.
        """
        rank = len(self.draft.own("scatter_add", x).shape)
        return self.op("scatter_add", [x, src, index, x], dim=_dim("scatter_add", dim, rank))[0]

    def one_hot(self, ids: TensorNode, classes: int) -> TensorNode:
        """`[..., classes]` in f32: 1 at the id, else 0. It has no gradient."""
        return self.op(
            "one_hot", [ids], classes=_validate.integer("one_hot", "classes", classes, 1, MAX_SIZE)
        )[0]

    def gather_batch(self, x: TensorNode) -> TensorNode:
        """All rows of `x` `[batch, d]` on every device, for products of each element of the batch with all
        others (as in contrastive losses). A step then has one microbatch.
        """
        return self.op("gather_batch", [x])[0]

    def dropout(self, x: TensorNode, p: float) -> TensorNode:
        """`x / (1 - p)`, or 0 with probability `p`, in training; x in evaluation. The mask depends on the
        instance's seed, the step, the path of the layer and the element's index, so it is the same on
        every mesh (`GraphInstance.train`).
        """
        share = _validate.number("dropout", "p", p, 0.0, 1.0)
        if share == 1.0:
            _validate.invalid("dropout", "p must be below 1", "1", "lower it")
        if share == 0.0:
            return self.draft.own("dropout", x)
        label = self.draft.own("dropout", x).spec.labels[0]
        is_batch = counts_batch(label)
        shape = (x.shape[0] if is_batch else 1, 4)
        number = sum(is_dropout_key(name) for name in self.draft.names)
        name = f"dropout.key{number}"
        spec = TensorSpec(shape, dtype_named("i32"), (label if is_batch else None, None), name)
        with self.all_or_nothing():
            return self.op("dropout", [x, self.draft.declare("input", spec)], p=share)[0]


def fixed_sizes(call: str, shape: Sequence[Any]) -> tuple[int, ...]:
    """Sizes, which must be fixed."""
    if not all(isinstance(size, int) and size > 0 for size in shape):
        rule = "the call needs tensors of fixed sizes"
        _validate.invalid(call, rule, f"{[*map(str, shape)]}", "declare the sizes as numbers")
    return tuple(shape)


def _number(call: str, value: Any) -> float:
    """An operand that is not a tensor."""
    if isinstance(value, np.ndarray):
        advice = "declare it with graph.constant, or as an input"
        _validate.invalid(call, "an operand must be a tensor of the graph or a number", "an array", advice)
    return _validate.number(call, "an operand that is not a tensor", value, -MAX_F32, MAX_F32)


def _dim(call: str, dim: int, rank: int) -> int:
    """A dim, counted from 0."""
    return _validate.integer(call, "a dim", dim, -rank, rank - 1) % rank


def _axes(call: str, dim: Dims, rank: int) -> tuple[int, ...]:
    """Dims in ascending order, each once."""
    dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({_dim(call, d, rank) for d in dims})
    if not axes or len(axes) != len([*dims]):
        _validate.invalid(call, "dims must be different, and at least one", shown(dim), "correct them")
    return tuple(axes)
