"""RMS norm over the last dim or over each head of it, and layer norm, forward and backward.

Heads are adjacent in the last dim and share one gamma. The gradient of gamma is computed in two
sums: first over rows for each head, then over heads. The second sum follows the k splits of the
heads' label, because strategies may shard heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import fixed, incoming, require, require_positive
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import BATCH_SPLITS
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Partial, Specs, operand, optional, register, result
from tilewise.ir.tape import Tape, Term, terms_of

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
    """`x * rstd * (gamma + offset)`; rstd is saved for the backward pass.

    If `head_dim` is not 0, the last dim has adjacent heads of that size. Each head is normalized
    separately, and gamma has the width of one head.
    """

    name = "rms_norm"
    whole = "d"
    x: int = operand("... d")
    gamma: int = operand("d")
    eps: float
    offset: float
    head_dim: int
    y: int = result(like="x")
    rstd: int = result("...", dtype="f32", storage="scalars")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Heads may be sharded."""
        return {"x": "... h", "y": "... h", "rstd": "... h"} if self.head_dim else {}

    def check(self, spec: Specs) -> None:
        """The last dim holds whole heads, also on every device."""
        require_positive(self.name, eps=self.eps)
        x, gamma, size = spec(self.x), spec(self.gamma), self.head_dim
        if not size:
            return
        width, label = x.shape[-1], x.labels[-1]
        is_whole = isinstance(width, int) and size > 0 and width % size == 0
        require(is_whole, self.name, f"the last dim must hold heads of {size}", x)
        require(gamma.shape == (size,), self.name, f"gamma must have the size of a head, {size}", x, gamma)
        require(
            label is None or label.atom % size == 0,
            self.name,
            f"the label of the last dim must keep heads of {size} whole",
            x,
            advice="make its atom a multiple",
        )

    def results(self, spec: Specs) -> list[TensorSpec]:
        """rstd is `[...]`, or `[..., heads]` if heads are normalized separately."""
        y, rstd = super().results(spec)
        if self.head_dim:
            label = y.labels[-1]
            count = replace(label, atom=label.atom // self.head_dim) if label is not None else None
            heads = fixed(y.shape[-1]) // self.head_dim
            rstd = TensorSpec((*y.shape[:-1], heads), rstd.dtype, (*y.labels[:-1], count))
        return [y, rstd]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """One fused op computes dx (plus the gradient of the residual) and dgamma."""
        dy, rstd = incoming(self, grads), tape.use(self.rstd)
        x, gamma = tape.use(self.x), tape.use(self.gamma)
        return {"x": NormTerm(dy, x, rstd, gamma, self.gamma, self.offset, self.head_dim)}


@register
class RmsNormBackward(Op):
    """Gradient of `RmsNorm`, plus the gradient of a residual. dgamma is separate for each head."""

    name = "rms_norm_backward"
    combine_rank = 1  # after the contractions, whose sum is this op's residual
    whole = "d"
    partial_values = (Partial("dgamma", "...", "dgamma", tree=BATCH_SPLITS),)
    dy: int = operand("... d")
    x: int = operand("... d")
    rstd: int = operand("...", dtype="f32")
    gamma: int = operand("d")
    dresidual: int | None = optional("... d")
    offset: float
    head_dim: int
    dx: int = result(like="x", in_place="dy")
    dgamma: int = result(like="gamma", dtype="f32", accumulates=True)

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Heads may be sharded."""
        rows = dict.fromkeys(("dy", "x", "dresidual"), "... h")
        return {**rows, "rstd": "... h*", "dgamma": "h"} if self.head_dim else {}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """dgamma is as wide as gamma, or as x."""
        dx, dgamma = super().results(spec)
        if self.head_dim:
            dgamma = TensorSpec(dx.shape[-1:], dgamma.dtype, dx.labels[-1:], storage="vector")
        return [dx, dgamma]

    @classmethod
    def combine(cls, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """One op per norm, each adding the sum so far; contributes the gradient of gamma too."""
        for t in terms_of(NormTerm, terms):
            total, dgamma = tape.op(
                RmsNormBackward(
                    dy=t.dy,
                    x=t.x,
                    rstd=t.rstd,
                    gamma=t.gamma,
                    dresidual=total,
                    offset=t.offset,
                    head_dim=t.head_dim,
                )
            )
            of_heads = HeadSum(x=dgamma, head_dim=t.head_dim)
            tape.contribute(t.weight, tape.later(of_heads) if t.head_dim else dgamma)
        assert total is not None
        return total

    def lower(self, low: Lowering) -> None:
        """dx, and the partial values of dgamma per batch split. Then the sum of these along the
        tree over batch splits, and the reduction over devices.
        """
        x = low.tensor(self.x)
        split = low.split_temp(x.cols, "dgamma_splits")
        low.emit(
            "rms_norm_backward",
            over=x,
            dtype=x.dtype,
            tiles={
                "dx": low.row(self.dx),
                "dgamma_split": low.row(split, div=low.split_rows),
                "dy": low.row(self.dy),
                "x": low.row(x),
                "rstd": low.row(self.rstd),
                "gamma": low.whole(self.gamma),
                "dresidual": low.row(self.dresidual) if self.dresidual is not None else None,
            },
            ints=low.split_cut,
            floats={"offset": self.offset},
        )
        low.split_tree(self.dgamma, split)


@register
class HeadSum(Op):
    """The sum `[head_dim]` over the adjacent heads of a vector, in fp32, along the tree over the k
    splits of the vector's label.
    """

    name = "head_sum"
    partial_values = (Partial("gain", "h", "out"),)
    x: int = operand("h", dtype="f32", storage="vector")
    head_dim: int
    out: int = result("d", dtype="f32", storage="vector")

    def check(self, spec: Specs) -> None:
        """The vector holds whole heads, also on every device."""
        x, size = spec(self.x), self.head_dim
        label = x.labels[0]
        fits = size > 0 and fixed(x.shape[0]) % size == 0 and (label is None or label.atom % size == 0)
        require(fits, self.name, f"takes a vector with heads of {size} that its label keeps whole", x)

    def results(self, spec: Specs) -> list[TensorSpec]:
        """`[head_dim]`."""
        return [TensorSpec((self.head_dim,), DTYPES["f32"], storage="vector")]

    def lower(self, low: Lowering) -> None:
        """One task; if heads are sharded, the partial value is reduced."""
        spec, out = low.spec(self.x), low.tensor(self.out)
        pending = low.pending_reduction("gain")
        k_splits = low.label_splits(spec.labels[0], fixed(spec.shape[0]), pending)
        target = low.temp_like(out, dtype="f32", name="gain") if pending else out
        low.emit(
            "head_sum",
            over=low.one,
            step=0,
            dtype="f32",
            tiles={"out": low.whole(target), "x": low.whole(self.x)},
            ints={"num_k_splits": len(k_splits), "range": [v for c in k_splits for v in c]},
        )
        if pending:
            low.all_reduce(target, self.out, None, pending, step=0)


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
    """`(x - mean) * rstd * gamma + beta`; mean and rstd of every row are saved for the backward
    pass.
    """

    name = "layer_norm"
    whole = "d 2"
    x: int = operand("... d")
    gamma: int = operand("d")
    beta: int = operand("d")
    eps: float
    y: int = result(like="x")
    stats: int = result("... 2", dtype="f32")

    def check(self, spec: Specs) -> None:
        """eps is above 0."""
        require_positive(self.name, eps=self.eps)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """One fused op computes dx (plus the gradient of the residual), dgamma and dbeta."""
        dy, stats = incoming(self, grads), tape.use(self.stats)
        weights = self.gamma, self.beta
        return {"x": LayerNormTerm(dy, tape.use(self.x), stats, tape.use(self.gamma), weights)}


@register
class LayerNormBackward(Op):
    """Gradient of `LayerNorm`, plus the gradient of a residual."""

    name = "layer_norm_backward"
    combine_rank = 1
    whole = "d 2"
    partial_values = (
        Partial("dgamma", "...", "dgamma", tree=BATCH_SPLITS),
        Partial("dbeta", "...", "dbeta", tree=BATCH_SPLITS),
    )
    dy: int = operand("... d")
    x: int = operand("... d")
    stats: int = operand("... 2", dtype="f32")
    gamma: int = operand("d")
    dresidual: int | None = optional("... d")
    dx: int = result(like="x", in_place="dy")
    dgamma: int = result(like="gamma", dtype="f32", accumulates=True)
    dbeta: int = result(like="gamma", dtype="f32", accumulates=True)

    @classmethod
    def combine(cls, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """One op per norm, each adding the sum so far; contributes the gradients of gamma and beta
        too.
        """
        for t in terms_of(LayerNormTerm, terms):
            norm = LayerNormBackward(dy=t.dy, x=t.x, stats=t.stats, gamma=t.gamma, dresidual=total)
            total, *gradients = tape.op(norm)
            for weight, gradient in zip(t.weights, gradients):
                tape.contribute(weight, gradient)
        assert total is not None
        return total

    def lower(self, low: Lowering) -> None:
        """dx, and the partial values of dgamma and dbeta per batch split. Then the sums of these
        along the tree over batch splits, and the reductions over devices.
        """
        x = low.tensor(self.x)
        dgamma, dbeta = (low.split_temp(x.cols, f"{name}_splits") for name in ("dgamma", "dbeta"))
        low.emit(
            "layer_norm_backward",
            over=x,
            dtype=x.dtype,
            tiles={
                "dx": low.row(self.dx),
                "dgamma_split": low.row(dgamma, div=low.split_rows),
                "dbeta_split": low.row(dbeta, div=low.split_rows),
                "dy": low.row(self.dy),
                "x": low.row(x),
                "stats": low.row(self.stats),
                "gamma": low.whole(self.gamma),
                "dresidual": low.row(self.dresidual) if self.dresidual is not None else None,
            },
            ints=low.split_cut,
        )
        low.split_tree(self.dgamma, dgamma)
        low.split_tree(self.dbeta, dbeta)
