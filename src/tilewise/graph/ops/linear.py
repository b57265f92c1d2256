"""Products with trained weights: `linear`, its weight gradient, and `matmul` of two activations.

Weights are stored in packed panels (native/kernels/microkernel.h). `linear` sums over terms `x_t ·
w_t`, so that the input gradient of q, k and v (or of gate and up) is a single contraction under
every strategy (docs/numerics.md, rule 3). With `transpose`, weights `[n, k]` are used transposed,
as in a usual forward pass. Without it, weights are used as stored, as in the input gradient of such
a product. Each of the two is the input gradient of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewise.core.dims import DimLabel, k_split_range
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import PlanError
from tilewise.graph.ops.common import fixed, incoming, leading, require, require_floats, same_shape
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering, Ref
from tilewise.ir.op import Factors, Op, PartialValue, Signature, register
from tilewise.ir.program import Number, NumberLike, Operand
from tilewise.ir.tape import Gradient, Tape, Term, terms_of

__all__ = ["LinearTerm", "contraction_label"]

MAX_TERMS = 16  # kMaxTerms of native/kernels/product.h
_FEWEST_BYTES = 1 << 16  # least bytes of weights per task, if tasks share a product by columns


@dataclass(frozen=True)
class LinearTerm(Term):
    """A summand `dy · w` of an input gradient. All terms of a tensor become one `linear`."""

    combined_by = "linear"

    dy: int
    weight: int
    transpose: bool


def contraction_label(weight: TensorSpec, transpose: bool) -> DimLabel | None:
    """The label of the contracted dim of a weight."""
    return weight.labels[1 if transpose else 0]


@register
class Linear(Op):
    """`out = Σ_t x_t w_tᵀ (+ residual)`.

    Inputs are x_0, w_0, x_1, w_1, …, and then the residual or the bias, if there is one. A bias is
    one vector that is added to every row. Residual and bias are added in fp32, before the result is
    rounded.
    """

    name = "linear"
    is_costly = True
    signature = Signature(
        lambda attrs: 2 * attrs["num_terms"] + (attrs["residual"] or attrs["bias"]),
        attributes={"num_terms": int, "transpose": bool, "residual": bool, "bias": bool},
    )

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """The weights."""
        return position % 2 == 1 and position < 2 * attrs["num_terms"]

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """`[..., n]` with the dtype of x."""
        terms = attrs["num_terms"]
        require(
            1 <= terms <= MAX_TERMS,
            "linear",
            f"has 1 to {MAX_TERMS} terms, not {terms}",
            advice="add them up",
        )
        x0, w0 = inputs[0], inputs[1]
        assert x0 is not None and w0 is not None
        inner, outer = (1, 0) if attrs["transpose"] else (0, 1)
        for x, w in zip(inputs[0 : 2 * terms : 2], inputs[1 : 2 * terms : 2]):
            assert x is not None and w is not None
            require(
                w.storage == "packed" and len(w.shape) == 2,
                "linear",
                "a weight must be a parameter with two dims",
                x,
                w,
                advice="multiply results with matmul",
            )
            require_floats("linear", x)
            require(
                x.storage == "rows", "linear", "x must be rows of elements", x, w, advice="add a last dim"
            )
            require(x.shape[:-1] == x0.shape[:-1], "linear", "terms must have one number of rows", x0, x)
            require(
                x.shape[-1] == w.shape[inner],
                "linear",
                "inner sizes must agree",
                x,
                w,
                advice="transpose the weight",
            )
            advice = "convert x with graph.cast(x, dtype), or declare the weight with its dtype"
            require(x.dtype == w.dtype, "linear", "operands must have one dtype", x, w, advice=advice)
            require(w.shape[outer] == w0.shape[outer], "linear", "terms must have one output size", w0, w)
        out = TensorSpec((*x0.shape[:-1], w0.shape[outer]), x0.dtype, (*x0.labels[:-1], w0.labels[outer]))
        require(not (attrs["residual"] and attrs["bias"]), "linear", "adds a residual or a bias", out)
        if attrs["residual"]:
            same_shape("linear", out, inputs[2 * terms])
        if attrs["bias"]:
            bias = inputs[2 * terms]
            assert bias is not None
            fits = bias.shape == out.shape[-1:] and bias.dtype == out.dtype and bias.storage == "vector"
            require(fits, "linear", "a bias must be a vector of the output's size and dtype", out, bias)
        return [out]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Rows, the outer dim, and one contracted factor for all terms."""
        assert inputs[0] is not None
        rows = leading(inputs[0])
        weight = ("n", "k") if attrs["transpose"] else ("k", "n")
        names: list[tuple[str, ...] | None] = []
        for _ in range(attrs["num_terms"]):
            names += [(*rows, "k"), weight]
        if attrs["residual"]:
            names.append((*rows, "n"))
        if attrs["bias"]:
            names.append(("n",))
        product = PartialValue("product", ("k",), (0,), cut_by=tuple(range(1, 2 * attrs["num_terms"], 2)))
        return Factors(tuple(names), ((*rows, "n"),), partial_values=(product,))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """dx = dy·w, dw = dyᵀ·x, and dy itself for the residual, or its sum over rows for a bias."""
        dy = incoming(op, grads)
        transpose = op.attrs["transpose"]
        result: list[Gradient] = []
        for t in range(op.attrs["num_terms"]):
            x, w = tape.use(op.given[2 * t]), tape.use(op.given[2 * t + 1])
            result.append(LinearTerm(dy, w, not transpose))
            result.append(tape.later("linear_dw", [w, dy, x] if transpose else [w, x, dy]))
        if op.attrs["bias"]:
            return [*result, tape.later("bias_gradient", [tape.use(op.given[-1]), dy])]
        return [*result, dy] if op.attrs["residual"] else result

    def combine(self, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """One `linear` over all terms, with the sum so far as its residual."""
        every = terms_of(LinearTerm, terms)
        for transpose in (False, True):
            alike = [t for t in every if t.transpose == transpose]
            for first in range(0, len(alike), MAX_TERMS):
                group = alike[first : first + MAX_TERMS]
                inputs = [i for t in group for i in (t.dy, t.weight)] + ([] if total is None else [total])
                attrs = {"num_terms": len(group), "transpose": transpose, "residual": total is not None}
                total = tape.op("linear", inputs, **attrs, bias=False)[0]
        assert total is not None
        return total

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile, or per tile of columns if there may be few rows. If the
        contraction is sharded, tasks compute partial values in fp32, which are then reduced over
        devices.
        """
        terms, transpose = op.attrs["num_terms"], op.attrs["transpose"]
        out = low.tensor(op.outputs[0])
        residual = op.given[2 * terms] if len(op.given) > 2 * terms else None
        pairs = [(op.given[2 * t], op.given[2 * t + 1]) for t in range(terms)]
        pending = low.pending_reduction(op, "product")
        contracted = [
            (low.spec(w), contraction_label(low.spec(w), transpose), 1 if transpose else 0) for _, w in pairs
        ]
        for weight, label, dim in contracted:
            _require_pairs(op, weight, label, dim, low.k_splits)
        k_splits = low.contraction_splits(contracted, pending)
        target = (
            low.temp_like(out, dtype="f32", name="partial", pending=pending) if pending else op.outputs[0]
        )
        ints: dict[str, NumberLike | Sequence[NumberLike]] = {
            "num_k_splits": len(k_splits),
            "range": [v for c in k_splits for r in c for v in r],
        }
        kernel = "matmul" if transpose else "matmul_dx"
        columns = low.tensor(target).tile_cols
        if columns and _num_bytes([low.tensor(w) for _, w in pairs], columns, transpose) >= _FEWEST_BYTES:
            low.emit(
                kernel,
                op,
                over=low.tensor(pairs[0][1]) if transpose else Number(out.cols),
                step=columns,
                dtype=out.dtype,
                tiles={
                    "out": low.col(target),
                    "residual": None if pending or residual is None else low.col(residual),
                    "a": [low.whole(x) for x, _ in pairs],
                    "w": [low.row(w) if transpose else low.col(w) for _, w in pairs],
                },
                ints=ints,
            )
            if pending:  # peers are signaled per row tile
                low.hold(op, out.extent, low.row_step(out), low.row(target), f"{op.label}/joined")
        else:
            low.emit(
                kernel,
                op,
                over=out,
                dtype=out.dtype,
                tiles={
                    "out": low.row(target),
                    "residual": None if pending or residual is None else _rows_of(low, residual, op),
                    "a": [low.row(x) for x, _ in pairs],
                    "w": [low.whole(w) for _, w in pairs],
                },
                ints=ints,
            )
        if pending:
            low.all_reduce(op, target, op.outputs[0], residual, pending)


def _require_pairs(op: OpNode, weight: TensorSpec, label: DimLabel | None, dim: int, k_splits: int) -> None:
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
            f"of {label.name!r} in pieces of {label.atom}, in {op.label!r}; use pieces (heads) "
            "of an even size, or f32"
        )


def _num_bytes(weights: Sequence[Ref], columns: int, transpose: bool) -> int:
    """Bytes of weights that a task reads if it computes this many columns."""
    contracted = (w.cols if transpose else w.extent.constant for w in weights)
    return sum(columns * k * DTYPES[w.dtype].itemsize for k, w in zip(contracted, weights))


def _rows_of(low: Lowering, residual: int, op: OpNode) -> Operand:
    """The operand that is added to a tile: the same rows of a residual, or the one row of a bias."""
    return low.whole(residual) if op.attrs["bias"] else low.row(residual)


@register
class LinearWeightGradient(Op):
    """Gradient of a weight in fp32, `rowsᵀ · cols`: a contraction over tokens, batch split by batch
    split.

    Inputs are the weight (for its shape), rows (the operand whose columns the weight's first dim
    counts) and cols (the same for the second dim).
    """

    name = "linear_dw"
    accumulates = (0,)
    shape_of = frozenset({0})
    signature = Signature(3)

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """The weight."""
        return position == 0

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """fp32 with the weight's shape."""
        w = inputs[0]
        assert w is not None
        return [replace(w, dtype=DTYPES["f32"], name="")]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Tokens are contracted; the weight's dims are not."""
        assert inputs[1] is not None
        tokens = leading(inputs[1])
        names = (("n", "k"), (*tokens, "n"), (*tokens, "k"))
        return Factors(
            names, (("n", "k"),), partial_values=(PartialValue("tokens", tokens, (0,), tree=BATCH_SPLITS),)
        )

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per block of weight rows, over all batch splits of this device. Then the
        reduction over the devices that share the batch.
        """
        weight, rows, cols = op.given
        target = low.accumulator(op, 0)
        low.emit(
            "matmul_dw",
            op,
            over=target.ref,
            step=target.ref.tile_rows,
            dtype=low.spec(weight).dtype.name,
            tiles={
                "out": low.row(target.ref),
                "dy": low.col(rows),
                "x": low.whole(cols),
                "carry": [low.row(c) for c in target.carries],
            },
            ints={"split_rows": low.split_rows, "vocab_begin": 0, "padded_len": low.padded_len},
            priority=-1,
        )
        low.finish_accumulation(op, target)


@register
class Matmul(Op):
    """Product of two computed 2-D tensors, either of which may be transposed. Products with weights
    are `linear` ops.
    """

    name = "matmul"
    is_costly = True
    signature = Signature(2, attributes={"transpose_a": bool, "transpose_b": bool})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """`[m, n]` with the operands' dtype."""
        a, b = inputs
        assert a is not None and b is not None
        rows = all(s.storage == "rows" and len(s.shape) == 2 for s in (a, b))
        require(rows, "matmul", "operands must have two dims", a, b)
        require_floats("matmul", a, b)
        m, k = a.shape[::-1] if attrs["transpose_a"] else a.shape
        k2, n = b.shape[::-1] if attrs["transpose_b"] else b.shape
        require(k == k2, "matmul", "inner sizes must agree", a, b, advice="set transpose_a or transpose_b")
        labels = a.labels[1 if attrs["transpose_a"] else 0], b.labels[0 if attrs["transpose_b"] else 1]
        return [TensorSpec((m, n), a.dtype, labels)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Only rows may be sharded: the contraction of two results is never split."""
        a = ("k", "m") if attrs["transpose_a"] else ("m", "k")
        b = ("n", "k") if attrs["transpose_b"] else ("k", "n")
        return Factors((a, b), (("m", "n"),), whole=frozenset("k"))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """Products of dy with the other operand, transposed as needed."""
        dy = incoming(op, grads)
        a, b = (tape.use(i) for i in op.given)
        ta, tb = op.attrs["transpose_a"], op.attrs["transpose_b"]
        da = tape.matmul(b, dy, tb, True) if ta else tape.matmul(dy, b, False, not tb)
        db = tape.matmul(dy, a, True, ta) if tb else tape.matmul(a, dy, not ta, False)
        return [da, db]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile. If the first operand is transposed, one task for all rows."""
        a, b = op.given
        out = low.tensor(op.outputs[0])
        transposed = op.attrs["transpose_a"]
        view = low.whole if transposed else low.row
        low.emit(
            "gemm",
            op,
            over=out,
            step=0 if transposed else None,
            dtype=out.dtype,
            tiles={"out": view(out), "a": view(a), "b": low.whole(b)},
            ints={"trans_a": transposed, "trans_b": op.attrs["transpose_b"], "accumulate": 0},
        )
