"""`TensorMethods`: the calls of `GraphBuilder` on tensors of any shape. They broadcast, choose ops by
shape, and compose ops.

Names and defaults are those of PyTorch, where PyTorch has the call. Sizes are fixed, unless a call
says otherwise. Dims may be counted from the end: -1 is the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np

from tilewise.core.dims import MAX_SIZE, DimLabel
from tilewise.core.dtypes import MAX_F32
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator, shown
from tilewise.graph.draft import GraphDraft
from tilewise.ir.graph import TensorNode

__all__ = ["Operand", "TensorMethods"]

Operand = TensorNode | float
"""A tensor of the graph, or a number."""

Dims = int | Sequence[int] | None
"""A dim, some dims, or None for all."""

_validate = Validator("graph", ShapeError)


class TensorMethods:
    """The part of `GraphBuilder` for tensors of any shape."""

    draft: GraphDraft

    def op(self, name: str, inputs: Sequence[TensorNode | None], **attrs: Any) -> list[TensorNode]:
        """Append an op by name (`GraphBuilder.op`)."""
        raise NotImplementedError

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """A `with` block whose declarations and ops are removed if it raises."""
        return self.draft.all_or_nothing()

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

    def maximum(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """The larger of two elements, broadcast like `add`; NaN if one is NaN."""
        return self._binary("maximum", a, b)

    def minimum(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """The smaller of two elements, broadcast like `add`; NaN if one is NaN."""
        return self._binary("minimum", a, b)

    def greater(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """1 where `a > b`, else 0, in the dtype of the operands; it has no gradient."""
        return self._binary("greater", a, b)

    def equal(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """1 where `a == b`, else 0, in the dtype of the operands; it has no gradient."""
        return self._binary("equal", a, b)

    def where(self, mask: TensorNode, a: TensorNode, b: TensorNode) -> TensorNode:
        """`a` where the mask is not 0, `b` where it is 0; broadcast like `add`."""
        with self.all_or_nothing():
            a, b = self._pair("where", a, b)
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
            number = _validate.number(call, "an operand", b, -MAX_F32, MAX_F32)
            if call in ("add", "sub"):
                return self.op("shift", [a], value=number if call == "add" else -number)[0]
            if call == "div" and number == 0:
                _validate.invalid(call, "a divisor must not be 0", "0", "correct it")
            return self.op("scale", [a], factor=number if call == "mul" else 1.0 / number)[0]
        number = _validate.number(call, "an operand", a, -MAX_F32, MAX_F32)
        if not isinstance(b, TensorNode):
            _validate.invalid(call, "an operand must be a tensor", shown(b), "pass one of the graph")
        if call in ("add", "mul"):
            return self._arithmetic(call, b, number)
        with self.all_or_nothing():
            if call == "sub":
                return self.op("shift", self.op("scale", [b], factor=-1.0), value=number)[0]
            return self.op("scale", self.op("power", [b], exponent=-1.0), factor=number)[0]

    def _binary(self, name: str, a: TensorNode, b: TensorNode) -> TensorNode:
        if a.spec.form[0] == b.spec.form[0] and a.spec.storage == b.spec.storage:  # the usual case
            return self.op(name, [a, b])[0]
        with self.all_or_nothing():
            return self.op(name, self._pair(name, a, b))[0]

    # ---- broadcasting -------------------------------------------------------------------------------------

    def expand(self, x: TensorNode, shape: Sequence[int]) -> TensorNode:
        """x, broadcast to a shape as in NumPy."""
        sizes = _sizes("expand", shape)
        return x if self.draft.own("expand", x).shape == sizes else self.op("expand", [x, None], shape=sizes)[0]

    def _pair(self, call: str, a: TensorNode, b: TensorNode) -> list[TensorNode]:
        """Two tensors, broadcast to one shape."""
        one, other = self.draft.own(call, a).spec, self.draft.own(call, b).spec
        if one.shape == other.shape:
            return [a, b] if one.storage == other.storage else [self._as_rows(a), self._as_rows(b)]
        if one.storage in ("vector", "packed"):
            return [self._in_rows(call, a, b), b]
        if other.storage in ("vector", "packed"):
            return [a, self._in_rows(call, b, a)]
        try:
            shape = np.broadcast_shapes(_sizes(call, one.shape), _sizes(call, other.shape))
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
        return self._reshape(x, _sizes("reshape", x.shape), x.shape) if x.spec.storage == "scalars" else x  # type: ignore[arg-type]

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
                x = x if spec.dtype.name == "f32" else self.op("cast", [x], dtype="f32")[0]
                return self.op("spread", [x, like])[0]
        else:
            rows, cols = spec.shape
            fits = rows in (1, shape[-2]) and cols in (1, shape[-1])
            if fits:
                ids = self._row_numbers(_sizes(call, shape[:-1]), like.spec.labels[:-1], rows == 1)
                wide = self.op("embedding", [ids, x])[0]
                return wide if cols == shape[-1] else self.op("expand", [wide, like], shape=shape)[0]
        _validate.invalid(
            call,
            "a and b must have one shape, or shapes that NumPy would broadcast",
            f"{spec} {spec.name!r}, {like.spec}",
            "reshape one of them",
        )

    def _row_numbers(self, shape: tuple[int, ...], labels: Sequence[DimLabel | None], are_zero: bool) -> TensorNode:
        """The index along the last dim for each element of a shape, or zeros, as a constant."""
        name = f"rows.{'x'.join(map(str, shape))}{'.zero' if are_zero else ''}"
        if labels[0] is not None:
            name += f".{labels[0].name}"
        if name in self.draft.names:
            return self.draft.tensors[self.draft.names[name]]
        numbers = np.zeros(shape[-1], np.int32) if are_zero else np.arange(shape[-1], dtype=np.int32)
        value = np.ascontiguousarray(np.broadcast_to(numbers, shape))
        is_batch = labels[0] is not None and labels[0].is_summed_by_batch_splits
        own = [labels[0] if is_batch else None, *[None] * (len(shape) - 1)]
        return self.constant(value, name=name, labels=own, storage="scalars")

    def constant(
        self, value: np.ndarray, *, name: str, labels: Sequence[DimLabel | None] = (), storage: str = "rows"
    ) -> TensorNode:
        """Declare a constant (`GraphBuilder.constant`)."""
        raise NotImplementedError

    # ---- shapes -------------------------------------------------------------------------------------------

    def reshape(self, x: TensorNode, shape: Sequence[int]) -> TensorNode:
        """The elements in the same order with another shape; one size may be -1, which stands for what is
        left. Devices keep sharing a labelled dim whose pieces stay whole, such as heads that are
        split off.
        """
        source = _sizes("reshape", self.draft.own("reshape", x).shape)
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
        source = _sizes("reshape", x.shape)
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
        sizes = _sizes("slice", self.draft.own("slice", x).shape)
        at = _dim("slice", dim, len(sizes))
        size = sizes[at]
        begin = _validate.integer("slice", "start", start, -size, size)
        end = size if stop is None else _validate.integer("slice", "stop", stop, -size, size)
        begin, end = begin % size if begin < 0 else begin, end % size if end < 0 else end
        if begin >= end:
            _validate.invalid("slice", "a slice must have elements", f"[{start}, {stop}) of {size}", "correct it")
        if (begin, end) == (0, size):
            return x
        first = tuple(begin if d == at else 0 for d in range(len(sizes)))
        shape = tuple(end - begin if d == at else n for d, n in enumerate(sizes))
        return self.op("slice_dims", [x], source=sizes, begin=first, shape=shape)[0]

    def split(self, x: TensorNode, sizes: int | Sequence[int], dim: int = 0) -> list[TensorNode]:
        """Parts of x along a dim: of these sizes, or of one size each (the last one may be smaller)."""
        whole = _sizes("split", self.draft.own("split", x).shape)
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
        parts = [self.draft.own("concat", t) for t in _validate.sequence("concat", "tensors", tensors, "tensors")]
        if not parts:
            _validate.invalid("concat", "there must be a tensor", "none", "pass at least one")
        shapes = [_sizes("concat", t.shape) for t in parts]
        at = _dim("concat", dim, len(shapes[0]))
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            got = ", ".join(str(t.spec) for t in parts)
            _validate.invalid("concat", "tensors must have one number of dims", got, "reshape them")
        lengths = tuple(shape[at] for shape in shapes)
        shape = tuple(sum(lengths) if d == at else n for d, n in enumerate(shapes[0]))
        return parts[0] if len(parts) == 1 else self.op("concat", parts, dim=at, lengths=lengths, shape=shape)[0]

    def pad(self, x: TensorNode, widths: Mapping[int, tuple[int, int]], value: float = 0.0) -> TensorNode:
        """x with elements of `value` around it: `{dim: (before, after)}`."""
        source = _sizes("pad", self.draft.own("pad", x).shape)
        before, shape = [0] * len(source), [*source]
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
        axes = _axes(call, dim, len(spec.shape))
        if call == "mean" and not all(isinstance(spec.shape[d], int) for d in axes):
            _validate.invalid("mean", "a mean needs fixed sizes", f"{spec}", "sum it, and scale the sum")
        count = prod(n for d in axes if isinstance(n := spec.shape[d], int))
        factor = 1.0 / count if call == "mean" else 1.0
        label = spec.labels[0]
        is_batch = 0 in axes and label is not None and label.is_summed_by_batch_splits
        with self.all_or_nothing():
            if len(axes) == len(spec.shape):
                total = self.op("sum", [x])[0]
                return total if factor == 1.0 else self.op("scale", [total], factor=factor)[0]
            if not is_batch:
                source = _sizes(call, spec.shape)
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
        source = _sizes("max", self.draft.own("max", x).shape)
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
        return self.op("one_hot", [ids], classes=_validate.integer("one_hot", "classes", classes, 1, MAX_SIZE))[0]

    def gather_batch(self, x: TensorNode) -> TensorNode:
        """All rows of `x` `[batch, d]` on every device, for products of each element of the batch with all
        others (as in contrastive losses). A step then has one microbatch.
        """
        return self.op("gather_batch", [x])[0]

    # ---- losses -------------------------------------------------------------------------------------------

    def mse_loss(self, x: TensorNode, target: TensorNode, *, reduction: str = "mean") -> TensorNode:
        """The squared difference: its `mean` or `sum` over everything, or every element (`none`)."""
        with self.all_or_nothing():
            difference = self.sub(x, target)
            return self._reduced("mse_loss", self.mul(difference, difference), reduction)

    def l1_loss(self, x: TensorNode, target: TensorNode, *, reduction: str = "mean") -> TensorNode:
        """The absolute difference, reduced like `mse_loss`."""
        with self.all_or_nothing():
            return self._reduced("l1_loss", self.abs(self.sub(x, target)), reduction)

    def binary_cross_entropy_with_logits(
        self, x: TensorNode, target: TensorNode, *, reduction: str = "mean"
    ) -> TensorNode:
        """Binary cross-entropy of logits with targets in [0, 1], reduced like `mse_loss`."""
        with self.all_or_nothing():
            loss = self._binary("bce_with_logits", x, target)
            return self._reduced("binary_cross_entropy_with_logits", loss, reduction)

    def _reduced(self, call: str, x: TensorNode, reduction: str) -> TensorNode:
        _validate.choice(call, "reduction", reduction, ("mean", "sum", "none"))
        return x if reduction == "none" else self._total(reduction, x, None, False)

    # ---- convolutions -------------------------------------------------------------------------------------

    def conv2d(
        self,
        x: TensorNode,
        weight: TensorNode,
        bias: TensorNode | None = None,
        *,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
    ) -> TensorNode:
        """Convolution of images `[batch, channels, height, width]`, computed as a product of their windows
        with the weight.

        Args:
            x: the images.
            weight: a parameter `[out_channels, channels * kernel_height * kernel_width]`: PyTorch's
                weight, with its last three dims merged.
            bias: a vector `[out_channels]`.
            kernel_size, stride, padding, dilation: a number, or (height, width).
        """
        sizes = _sizes("conv2d", self.draft.own("conv2d", x).shape)
        if len(sizes) != 4:
            rule = "images must be [batch, channels, height, width]"
            _validate.invalid("conv2d", rule, f"{x.spec}", "reshape them")
        pairs = {
            "window": _pair_of("kernel_size", kernel_size, 1),
            "stride": _pair_of("stride", stride, 1),
            "padding": _pair_of("padding", padding, 0),
            "dilation": _pair_of("dilation", dilation, 1),
        }
        with self.all_or_nothing():
            windows = self.op("unfold", [x], image=sizes[1:], **pairs)[0]
            y = self.op("linear", [windows, weight, None, None], transpose=True)[0]
            if bias is not None:
                y = self.op("add_bias", [y, bias])[0]
            down, right = (
                (n + 2 * p - d * (k - 1) - 1) // s + 1
                for n, k, s, p, d in zip(sizes[2:], *(pairs[name] for name in ("window", "stride", "padding", "dilation")))
            )
            channels = _sizes("conv2d", y.shape)[-1]
            return self._reshaped(self.permute(y, (0, 2, 1)), (sizes[0], channels, down, right))

    def conv1d(
        self,
        x: TensorNode,
        weight: TensorNode,
        bias: TensorNode | None = None,
        *,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
    ) -> TensorNode:
        """Convolution of `[batch, channels, length]`; the weight is `[out_channels, channels *
        kernel_size]`. The arguments are those of `conv2d`.
        """
        sizes = _sizes("conv1d", self.draft.own("conv1d", x).shape)
        if len(sizes) != 3:
            _validate.invalid("conv1d", "x must be [batch, channels, length]", f"{x.spec}", "reshape it")
        with self.all_or_nothing():
            y = self.conv2d(
                self._reshaped(x, (*sizes[:2], 1, sizes[2])),
                weight,
                bias,
                kernel_size=(1, kernel_size),
                stride=(1, stride),
                padding=(0, padding),
                dilation=(1, dilation),
            )
            batch, channels, _, length = _sizes("conv1d", y.shape)
            return self._reshaped(y, (batch, channels, length))


def _sizes(call: str, shape: Sequence[Any]) -> tuple[int, ...]:
    """Sizes, which must be fixed."""
    if not all(isinstance(size, int) and size > 0 for size in shape):
        rule = "the call needs tensors of fixed sizes"
        _validate.invalid(call, rule, f"{[*map(str, shape)]}", "declare the sizes as numbers")
    return tuple(shape)


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


def _pair_of(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, tuple) or len(pair) != 2:
        _validate.invalid("conv2d", f"{name} must be a number or (height, width)", shown(value), "correct it")
    first, second = (_validate.integer("conv2d", name, n, least, MAX_SIZE) for n in pair)
    return first, second
