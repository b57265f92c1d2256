"""RMS norm over the last dim or over each head of it, and layer norm, forward and backward.

Heads are adjacent in the last dim and share one gamma. The gradient of gamma is computed in two
sums: first over rows for each head, then over heads. The second sum follows the k splits of the
heads' label, because strategies may shard heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import fixed, incoming, leading, require, require_floats, require_positive
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, PartialValue, Signature, register
from tilewise.ir.tape import Gradient, Tape, Term, terms_of

__all__ = ["LayerNormTerm", "NormTerm"]


@dataclass(frozen=True)
class NormTerm(Term):
    """The input gradient of a norm. Its op is appended later, so that the op can also add the
    gradient that reaches the input through a residual.

    `dy`, `x`, `rstd` and `gamma` are ids of the backward graph; `weight` is the gamma of the
    forward graph; `offset` and `head_dim` are the norm's.
    """

    dy: int
    x: int
    rstd: int
    gamma: int
    weight: int
    offset: float
    head_dim: int

    combined_by = "rms_norm_backward"


@register
class RmsNorm(Op):
    """`x * rstd * (gamma + offset)`. Outputs are y and rstd (saved for the backward pass).

    If `head_dim` is not 0, the last dim has adjacent heads of that size. Each head is normalized
    separately, and gamma has the width of one head.
    """

    name = "rms_norm"
    signature = Signature(2, attributes={"eps": float, "offset": float, "head_dim": int})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x, and rstd in fp32: `[...]`, or `[..., heads]` if heads are normalized
        separately.
        """
        x, gamma = inputs
        assert x is not None and gamma is not None
        require_floats("rms_norm", x, gamma)
        require_positive("rms_norm", eps=attrs["eps"])
        require(len(x.shape) > 1 and x.storage == "rows", "rms_norm", "x must be rows of elements", x, gamma)
        y, f32 = TensorSpec(x.shape, x.dtype, x.labels), DTYPES["f32"]
        if not attrs["head_dim"]:
            require(
                gamma.shape == x.shape[-1:], "rms_norm", "gamma must have the size of the last dim", x, gamma
            )
            return [y, TensorSpec(x.shape[:-1], f32, x.labels[:-1], storage="scalars")]
        size, width = attrs["head_dim"], x.shape[-1]
        require(
            isinstance(width, int) and size > 0 and width % size == 0,
            "rms_norm",
            f"the last dim must hold heads of {size}",
            x,
        )
        require(gamma.shape == (size,), "rms_norm", f"gamma must have the size of a head, {size}", x, gamma)
        label = x.labels[-1]
        require(
            label is None or label.atom % size == 0,
            "rms_norm",
            f"the label of the last dim must keep heads of {size} whole",
            x,
            advice="make its atom a multiple",
        )
        count = replace(label, atom=label.atom // size) if label is not None else None
        return [y, TensorSpec((*x.shape[:-1], fixed(width) // size), f32, (*x.labels[:-1], count))]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The normalized dim is not sharded; heads may be."""
        assert inputs[0] is not None
        rows = leading(inputs[0])
        if attrs["head_dim"]:
            x = (*rows, "h")
            return Factors((x, ("d",)), (x, x), whole=frozenset("d"))
        return Factors(((*rows, "d"), ("d",)), ((*rows, "d"), rows), whole=frozenset("d"))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """One fused op computes dx (plus the gradient of the residual) and dgamma."""
        x, gamma = op.given
        dy, rstd = incoming(op, grads), tape.use(op.outputs[1])
        offset, head_dim = op.attrs["offset"], op.attrs["head_dim"]
        return [NormTerm(dy, tape.use(x), rstd, tape.use(gamma), gamma, offset, head_dim), None]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        x, gamma = op.given
        t = low.tensor(x)
        y, rstd = op.outputs
        low.emit(
            "rms_norm",
            op,
            over=t,
            dtype=t.dtype,
            tiles={"y": low.row(y), "rstd": low.row(rstd), "x": low.row(x), "gamma": low.whole(gamma)},
            floats={"eps": op.attrs["eps"], "offset": op.attrs["offset"]},
        )


@register
class RmsNormBackward(Op):
    """Gradient of `RmsNorm`. Inputs are dy, x, rstd, gamma and dresidual (or None). Outputs are dx
    and dgamma (fp32), where dgamma is separate for each head.
    """

    name = "rms_norm_backward"
    combine_rank = 1  # after the contractions, whose sum is this op's residual
    accumulates = (1,)
    in_place = ((0, 0),)
    signature = Signature(5, absent=frozenset({4}), attributes={"offset": float, "head_dim": int})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """dx has the spec of x; dgamma is fp32 with the shape of gamma, or as wide as x."""
        _, x, _, gamma, _ = inputs
        assert x is not None and gamma is not None
        dgamma = replace(gamma, dtype=DTYPES["f32"], name="")
        if attrs["head_dim"]:
            dgamma = TensorSpec(x.shape[-1:], DTYPES["f32"], x.labels[-1:], storage="vector")
        return [TensorSpec(x.shape, x.dtype, x.labels), dgamma]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """dgamma contracts the rows."""
        assert inputs[1] is not None
        rows = leading(inputs[1])
        x = (*rows, "h" if attrs["head_dim"] else "d")
        rstd = x if attrs["head_dim"] else rows
        return Factors(
            (x, x, rstd, ("d",), x if inputs[4] is not None else None),
            (x, x[-1:]),
            whole=frozenset("d"),
            partial_values=(PartialValue("dgamma", rows, (1,), tree=BATCH_SPLITS),),
        )

    def combine(self, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """One op per norm, each adding the sum so far; contributes the gradient of gamma too."""
        for t in terms_of(NormTerm, terms):
            attrs = {"offset": t.offset, "head_dim": t.head_dim}
            total, dgamma = tape.op(self.name, [t.dy, t.x, t.rstd, t.gamma, total], **attrs)
            tape.contribute(
                t.weight, tape.later("head_sum", [dgamma], head_dim=t.head_dim) if t.head_dim else dgamma
            )
        assert total is not None
        return total

    def lower(self, low: Lowering, op: OpNode) -> None:
        """dx, and the partial values of dgamma per batch split. Then the sum of these along the
        tree over batch splits, and the reduction over devices.
        """
        dy, x, rstd, gamma = op.given[:4]
        residual = op.inputs[4]
        t = low.tensor(x)
        split = low.split_temp(t.cols, "dgamma_splits")
        low.emit(
            "rms_norm_backward",
            op,
            over=t,
            dtype=t.dtype,
            tiles={
                "dx": low.row(op.outputs[0]),
                "dgamma_split": low.row(split, div=low.split_rows),
                "dy": low.row(dy),
                "x": low.row(x),
                "rstd": low.row(rstd),
                "gamma": low.whole(gamma),
                "dresidual": low.row(residual) if residual is not None else None,
            },
            ints=low.split_cut,
            floats={"offset": op.attrs["offset"]},
        )
        low.split_tree(op, 1, split)


@register
class HeadSum(Op):
    """The sum `[head_dim]` over the adjacent heads of a vector, in fp32, along the tree over the k
    splits of the vector's label.
    """

    name = "head_sum"
    signature = Signature(1, attributes={"head_dim": int})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """fp32 `[head_dim]`."""
        (x,) = inputs
        assert x is not None
        size, width = attrs["head_dim"], x.shape[0]
        is_vector = x.storage == "vector" and x.dtype.name == "f32"
        label = x.labels[0]
        require(
            is_vector and size > 0 and fixed(width) % size == 0 and (label is None or label.atom % size == 0),
            self.name,
            f"takes a vector of f32 with heads of {size} that its label keeps whole",
            x,
        )
        return [TensorSpec((size,), DTYPES["f32"], storage="vector")]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The heads are contracted."""
        return Factors((("h",),), (("d",),), partial_values=(PartialValue("gain", ("h",), (0,)),))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task; if heads are sharded, the partial value is reduced."""
        (x,) = op.given
        spec, out = low.spec(x), low.tensor(op.outputs[0])
        pending = low.pending_reduction(op, "gain")
        k_splits = low.label_splits(spec.labels[0], fixed(spec.shape[0]), pending)
        target = low.temp_like(out, dtype="f32", name="gain") if pending else op.outputs[0]
        low.emit(
            "head_sum",
            op,
            over=low.one,
            step=0,
            dtype="f32",
            tiles={"out": low.whole(target), "x": low.whole(x)},
            ints={"num_k_splits": len(k_splits), "range": [v for c in k_splits for v in c]},
        )
        if pending:
            low.all_reduce(op, target, op.outputs[0], None, pending, step=0)


@dataclass(frozen=True)
class LayerNormTerm(Term):
    """The input gradient of a layer norm, like `NormTerm`. `weights` are gamma and beta of the
    forward graph.
    """

    dy: int
    x: int
    stats: int
    gamma: int
    weights: tuple[int, int]

    combined_by = "layer_norm_backward"


@register
class LayerNorm(Op):
    """`(x - mean) * rstd * gamma + beta`. Outputs are y, and mean and rstd of every row (saved for
    the backward pass).
    """

    name = "layer_norm"
    signature = Signature(3, attributes={"eps": float})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x, and statistics `[..., 2]` in fp32."""
        x, gamma, beta = inputs
        assert x is not None and gamma is not None and beta is not None
        require_floats(self.name, x, gamma, beta)
        require_positive(self.name, eps=attrs["eps"])
        require(len(x.shape) > 1 and x.storage == "rows", self.name, "x must be rows of elements", x, gamma)
        require(
            gamma.shape == beta.shape == x.shape[-1:],
            self.name,
            "gamma and beta must have the size of the last dim",
            x,
            gamma,
            beta,
        )
        return [
            TensorSpec(x.shape, x.dtype, x.labels),
            TensorSpec((*x.shape[:-1], 2), DTYPES["f32"], (*x.labels[:-1], None)),
        ]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The normalized dim is not sharded."""
        assert inputs[0] is not None
        rows = leading(inputs[0])
        x = (*rows, "d")
        return Factors((x, ("d",), ("d",)), (x, (*rows, "t")), whole=frozenset("dt"))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """One fused op computes dx (plus the gradient of the residual), dgamma and dbeta."""
        x, gamma, beta = op.given
        dy, stats = incoming(op, grads), tape.use(op.outputs[1])
        return [LayerNormTerm(dy, tape.use(x), stats, tape.use(gamma), (gamma, beta)), None, None]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        x, gamma, beta = op.given
        t = low.tensor(x)
        y, stats = op.outputs
        tiles = {
            "y": low.row(y),
            "stats": low.row(stats),
            "x": low.row(x),
            "gamma": low.whole(gamma),
            "beta": low.whole(beta),
        }
        low.emit("layer_norm", op, over=t, dtype=t.dtype, tiles=tiles, floats={"eps": op.attrs["eps"]})


@register
class LayerNormBackward(Op):
    """Gradient of `LayerNorm`. Inputs are dy, x, statistics, gamma and dresidual (or None). Outputs
    are dx, dgamma and dbeta (the last two in fp32).
    """

    name = "layer_norm_backward"
    combine_rank = 1
    accumulates = (1, 2)
    in_place = ((0, 0),)
    signature = Signature(5, absent=frozenset({4}))

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """dx has the spec of x. dgamma and dbeta are fp32 with the shape of gamma."""
        _, x, _, gamma, _ = inputs
        assert x is not None and gamma is not None
        return [
            TensorSpec(x.shape, x.dtype, x.labels),
            *[replace(gamma, dtype=DTYPES["f32"], name="")] * 2,
        ]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """dgamma and dbeta contract the rows."""
        assert inputs[1] is not None
        rows = leading(inputs[1])
        x = (*rows, "d")
        return Factors(
            (x, x, (*rows, "t"), ("d",), x if inputs[4] is not None else None),
            (x, ("d",), ("d",)),
            whole=frozenset("dt"),
            partial_values=(
                PartialValue("dgamma", rows, (1,), tree=BATCH_SPLITS),
                PartialValue("dbeta", rows, (2,), tree=BATCH_SPLITS),
            ),
        )

    def combine(self, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """One op per norm, each adding the sum so far; contributes the gradients of gamma and beta
        too.
        """
        for t in terms_of(LayerNormTerm, terms):
            total, *gradients = tape.op(self.name, [t.dy, t.x, t.stats, t.gamma, total])
            for weight, gradient in zip(t.weights, gradients):
                tape.contribute(weight, gradient)
        assert total is not None
        return total

    def lower(self, low: Lowering, op: OpNode) -> None:
        """dx, and the partial values of dgamma and dbeta per batch split. Then the sums of these
        along the tree over batch splits, and the reductions over devices.
        """
        dy, x, stats, gamma = op.given[:4]
        residual = op.inputs[4]
        t = low.tensor(x)
        batch_splits = {name: low.split_temp(t.cols, f"{name}_splits") for name in ("dgamma", "dbeta")}
        low.emit(
            "layer_norm_backward",
            op,
            over=t,
            dtype=t.dtype,
            tiles={
                "dx": low.row(op.outputs[0]),
                **{
                    f"{name}_split": low.row(split, div=low.split_rows)
                    for name, split in batch_splits.items()
                },
                "dy": low.row(dy),
                "x": low.row(x),
                "stats": low.row(stats),
                "gamma": low.whole(gamma),
                "dresidual": low.row(residual) if residual is not None else None,
            },
            ints=low.split_cut,
        )
        for output, split in enumerate(batch_splits.values(), 1):
            low.split_tree(op, output, split)
