"""Products with trained weights: `linear`, its weight gradient, and `matmul` of two activations.

Weights are stored in packed panels (native/kernels/microkernel.h). `linear` sums over terms `x_t ·
w_t`, so that the input gradient of q, k and v (or of gate and up) is a single contraction under
every strategy (docs/numerics.md, rule 3). With `transpose`, weights `[n, k]` are used transposed,
as in a usual forward pass. Without it, weights are used as stored, as in the input gradient of such
a product. Each of the two is the input gradient of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.dims import DimLabel, k_split_range
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import PlanError, ShapeError
from tilewise.graph.ops.bias import BiasGradient
from tilewise.graph.ops.common import fixed, incoming, require
from tilewise.graph.ops.items import Items, require_dims
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering, Ref
from tilewise.ir.op import Gradients, Op, Partial, Specs, operand, operands, optional, register, result
from tilewise.ir.program import Number, NumberLike
from tilewise.ir.tape import Gradient, Tape, Term, terms_of

__all__ = ["LinearTerm", "LinearWeightGradient", "contraction_label", "lower_rows_product"]

MAX_TERMS = 16  # kMaxTerms of native/kernels/product.h
_FEWEST_BYTES = 1 << 16  # least bytes of weights per task, if tasks share a product by columns


@dataclass(frozen=True)
class LinearTerm(Term):
    """A summand `dy · w` of an input gradient, see `Linear.combine`."""

    combined_by = "linear"

    dy: int
    weight: int
    transpose: bool
    is_trained: bool = True  # whether the weight is


def contraction_label(weight: TensorSpec, transpose: bool) -> DimLabel | None:
    """The label of the contracted dim of a weight."""
    return weight.labels[1 if transpose else 0]


@register
class Linear(Op):
    """`out = Σ_t x_t w_tᵀ (+ residual or bias)`.

    A bias is one vector that is added to every row. Residual and bias are added in fp32, before the
    result is rounded.
    """

    name = "linear"
    is_costly = True
    is_grouped: ClassVar[bool] = False
    partial_values = (Partial("product", "k", "out", cut_by="w"),)
    x: tuple[int, ...] = operands("... k*")
    w: tuple[int, ...] = operands("n k*", storage="packed", advice="multiply results with matmul")
    residual: int | None = optional("... n")
    bias: int | None = optional("n", storage="vector")
    transpose: bool
    out: int = result("... n")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Weights as stored."""
        return {} if self.transpose else {"w": "k* n"}

    def check(self, spec: Specs) -> None:
        """Inner sizes agree, weights are stored alike, and at most one tensor is added."""
        terms = len(self.x)
        first = spec(self.w[0])
        for w in map(spec, self.w):
            alike = w.storage == first.storage
            if not self.transpose:  # an input gradient reads several formats
                alike = alike or (w.format is not None and first.format is not None)
            require(alike, self.name, "weights must be stored alike", first, w)
        rule = f"has 1 to {MAX_TERMS} terms, not {terms}"
        require(terms <= MAX_TERMS, self.name, rule, advice="add them up")
        for x, w in zip(map(spec, self.x), map(spec, self.w)):
            fits = x.shape[-1] == w.shape[1 if self.transpose else 0]
            require(fits, self.name, "inner sizes must agree", x, w, advice="transpose the weight")
        is_one = self.residual is None or self.bias is None
        require(is_one, self.name, "adds a residual or a bias", spec(self.x[0]))

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """dx = dy·w, dw = dyᵀ·x, and dy itself for the residual, or its sum over rows for a bias."""
        dy = incoming(self, grads)
        dx: list[Gradient] = []
        dw: list[Gradient | None] = []
        for x, weight in zip(map(tape.use, self.x), self.w):
            w, is_needed = tape.use(weight), tape.is_needed(weight)
            dx.append(LinearTerm(dy, w, not self.transpose, is_needed))
            rows, cols = (dy, x) if self.transpose else (x, dy)
            dw.append(tape.later(LinearWeightGradient(w=w, rows=rows, cols=cols)) if is_needed else None)
        added: Gradients = {} if self.residual is None else {"residual": dy}
        if self.bias is not None:
            added = {"bias": tape.later(BiasGradient(bias=tape.use(self.bias), dy=dy))}
        return {"x": dx, "w": dw, **added}

    @classmethod
    def combine(cls, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """One `linear` over all terms, with the sum so far as its residual. Terms over a dim without a
        label are a `linear` of their own: devices cannot share them, and may share the others. So are
        terms of adapters, because the frozen weights may be quantised.
        """
        kinds: dict[tuple[bool, bool, bool], list[LinearTerm]] = {}
        for term in terms_of(LinearTerm, terms):
            is_labelled = contraction_label(tape.spec(term.weight), term.transpose) is not None
            kinds.setdefault((term.transpose, not is_labelled, term.is_trained), []).append(term)
        for (transpose, *_), alike in sorted(kinds.items()):
            for first in range(0, len(alike), MAX_TERMS):
                group = alike[first : first + MAX_TERMS]
                x, w = tuple(t.dy for t in group), tuple(t.weight for t in group)
                (total,) = tape.op(Linear(x=x, w=w, residual=total, bias=None, transpose=transpose))
        assert total is not None
        return total

    def lower(self, low: Lowering) -> None:
        """One task per row tile, or per tile of columns if there may be few rows. If the
        contraction is sharded, tasks compute partial values in fp32, which are then reduced over
        devices.
        """
        out, dim = low.tensor(self.out), 1 if self.transpose else 0
        pending = low.pending_reduction("product")
        contracted = [(s, contraction_label(s, self.transpose), dim) for s in map(low.spec, self.w)]
        for weight, label, _ in contracted:
            _require_pairs(low.op.label, weight, label, dim, low.k_splits)
        k_splits = low.contraction_splits(contracted, pending)
        target = low.temp_like(out, dtype="f32", name="partial", pending=pending) if pending else out
        columns = target.tile_cols
        if columns and _num_bytes([low.tensor(w) for w in self.w], columns, self.transpose) < _FEWEST_BYTES:
            columns = 0
        added = self.residual if self.bias is None else self.bias
        ints: dict[str, NumberLike | Sequence[NumberLike]] = {
            "num_k_splits": len(k_splits),
            "range": [v for c in k_splits for r in c for v in r],
        }
        kernel = "matmul" if self.transpose else "matmul_dx"
        formats = [spec.format.number for spec in map(low.spec, self.w) if spec.format is not None]
        if formats:
            kernel = f"{kernel}_quantised"
            ints["format"] = formats[0] if self.transpose else formats
            if self.transpose:
                ints["is_grouped"] = self.is_grouped
            columns = columns if self.transpose else 0  # a task reads whole blocks
        part, weight_part = low.row, low.whole
        if columns:
            part, weight_part = low.col, low.row if self.transpose else low.col
        added_part = low.whole if self.bias is not None and not columns else part
        low.emit(
            kernel,
            over=out if not columns else low.tensor(self.w[0]) if self.transpose else Number(out.cols),
            step=columns or None,
            dtype=out.dtype,
            tiles={
                "out": part(target),
                "residual": None if pending or added is None else added_part(added),
                "a": [low.whole(x) if columns else low.row(x) for x in self.x],
                "w": [weight_part(w) for w in self.w],
            },
            ints=ints,
        )
        if pending:
            if columns:  # peers are signaled per row tile
                low.hold(out.extent, low.row_step(out), low.row(target), f"{low.op.label}/joined")
            low.all_reduce(target, self.out, added, pending)


@register
class GroupedLinear(Linear):
    """`linear` with quantised weights of 4 bits, whose scales are applied to the sum of each group of
    32 products (docs/numerics.md, rule 12). It has no gradient, because an input gradient sums across
    scales.
    """

    name = "linear_grouped"
    is_grouped = True

    def check(self, spec: Specs) -> None:
        """As `linear`, with weights in a format that has such products."""
        super().check(spec)
        for w in map(spec, self.w):
            fits = self.transpose and w.format is not None and w.format.has_grouped_product
            require(fits, self.name, "weights must have codes of 4 bits", w, advice="use linear")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Rejected: the gradient of x sums across scales."""
        raise ShapeError(
            f"[graph.{self.name}] a grouped product has no gradient; got a loss that depends on one; "
            "make the graph with quantized_matmul exact"
        )


def _require_pairs(op: str, weight: TensorSpec, label: DimLabel | None, dim: int, k_splits: int) -> None:
    """Check that k splits of a bf16 product begin at even elements, because a word of a packed
    weight holds two elements.

    Raises:
        PlanError: a k split begins at an odd element.
    """
    if weight.dtype.name != "bf16" or label is None or label.is_summed_by_batch_splits:
        return
    size = fixed(weight.shape[dim])
    cuts = [k_split_range(label, size, k_splits, c) for c in range(k_splits)]
    odd = next((begin for begin, end in cuts if begin % 2 and begin < end), None)
    if odd is not None:
        raise PlanError(
            f"[plan.linear] k splits of a bf16 product must begin at even elements; got {odd} of {size} "
            f"of {label.name!r} in pieces of {label.atom}, in {op!r}; use pieces (heads) of an even size, or f32"
        )


def _num_bytes(weights: Sequence[Ref], columns: int, transpose: bool) -> int:
    """Bytes of weights that a task reads if it computes this many columns."""
    contracted = (w.cols if transpose else w.extent.constant for w in weights)
    return sum(columns * k * DTYPES[w.dtype].itemsize for k, w in zip(contracted, weights))


def lower_rows_product(low: Lowering, rows: int, cols: int, out: int) -> None:
    """`rowsᵀ · cols`: one task per block of rows of the result, over all batch splits of this device. Then the
    reduction over the devices that share the batch.
    """
    target = low.accumulator(out)
    low.emit(
        "matmul_dw",
        over=target.ref,
        step=target.ref.tile_rows,
        dtype=low.spec(rows).dtype.name,
        tiles={
            "out": low.row(target.ref),
            "dy": low.col(rows),
            "x": low.whole(cols),
            "carry": [low.row(c) for c in target.carries],
        },
        ints={"split_rows": low.split_rows, "vocab_begin": 0, "padded_len": low.padded_len},
        priority=-1,
    )
    low.finish_accumulation(target)


@register
class LinearWeightGradient(Op):
    """Gradient of a weight in fp32, `rowsᵀ · cols`: a contraction over tokens, batch split by batch
    split. The weight's first dim counts columns of `rows`, its second dim those of `cols`.
    """

    name = "linear_dw"
    partial_values = (Partial("tokens", "...", "dw", tree=BATCH_SPLITS),)
    w: int = operand("n k", packed=True, shape_only=True)
    rows: int = operand("... n")
    cols: int = operand("... k")
    dw: int = result(like="w", dtype="f32", accumulates=True)

    def lower(self, low: Lowering) -> None:
        """See `lower_rows_product`."""
        lower_rows_product(low, self.rows, self.cols, self.dw)


@register
class Matmul(Op):
    """Product of two computed 2-D tensors, either of which may be transposed. Products with weights
    are `linear` ops. Only rows of the result may be sharded: the contraction of two results is
    never split.
    """

    name = "matmul"
    is_costly = True
    whole = "k"
    a: int = operand("m k")
    b: int = operand("k n", advice="set trans_a or trans_b")
    trans_a: bool
    trans_b: bool
    out: int = result("m n")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Those of transposed operands."""
        return ({"a": "k m"} if self.trans_a else {}) | ({"b": "n k"} if self.trans_b else {})

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Products of dy with the other operand, transposed as needed."""
        dy, a, b = incoming(self, grads), tape.use(self.a), tape.use(self.b)
        ta, tb = self.trans_a, self.trans_b
        da = tape.matmul(b, dy, tb, True) if ta else tape.matmul(dy, b, False, not tb)
        db = tape.matmul(dy, a, True, ta) if tb else tape.matmul(a, dy, not ta, False)
        return {"a": da, "b": db}

    def lower(self, low: Lowering) -> None:
        """One task per row tile. If the first operand is transposed, one task for all rows."""
        out = low.tensor(self.out)
        view = low.whole if self.trans_a else low.row
        low.emit(
            "gemm",
            over=out,
            step=0 if self.trans_a else None,
            dtype=out.dtype,
            tiles={"out": view(out), "a": view(self.a), "b": low.whole(self.b)},
            ints={"trans_a": self.trans_a, "trans_b": self.trans_b, "accumulate": 0},
        )


@register
class BatchedMatmul(Op):
    """Products of corresponding matrices of two computed tensors, `[..., m, k]` and `[..., k, n]`,
    either of which may be transposed. The contraction is never split.
    """

    name = "batched_matmul"
    is_costly = True
    whole = "k"
    a: int = operand("... m k")
    b: int = operand("... k n", advice="set trans_a or trans_b")
    trans_a: bool
    trans_b: bool
    out: int = result("... m n")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Those of transposed operands."""
        return ({"a": "... k m"} if self.trans_a else {}) | ({"b": "... n k"} if self.trans_b else {})

    def check(self, spec: Specs) -> None:
        """Sizes are fixed."""
        require_dims(self.name, spec(self.a), spec(self.b))

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Products of dy with the other operand, transposed as needed."""
        dy, a, b = incoming(self, grads), tape.use(self.a), tape.use(self.b)
        ta, tb = self.trans_a, self.trans_b

        def product(left: int, right: int, trans_a: bool, trans_b: bool) -> int:
            return tape.op(BatchedMatmul(a=left, b=right, trans_a=trans_a, trans_b=trans_b))[0]

        da = product(b, dy, tb, True) if ta else product(dy, b, False, not tb)
        db = product(dy, a, True, ta) if tb else product(a, dy, not ta, False)
        return {"a": da, "b": db}

    def lower(self, low: Lowering) -> None:
        """One task per run of matrices."""
        items = Items.of(low, len(low.spec(self.out).shape) - 2, self.out, self.a, self.b)
        first, second = low.local_sizes(self.a)[-2:]
        rows, depth = (second, first) if self.trans_a else (first, second)
        assert isinstance(rows, int) and isinstance(depth, int)
        items.emit(
            "batched_gemm",
            self.out,
            {"out": self.out, "a": self.a, "b": self.b},
            ints={"rows": rows, "depth": depth, "trans_a": self.trans_a, "trans_b": self.trans_b},
        )
