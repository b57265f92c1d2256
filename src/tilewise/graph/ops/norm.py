"""Root-mean-square norm over the last dim, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import incoming, leading, require, require_floats, require_positive
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import LEAVES
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, Partial, Signature, register
from tilewise.ir.tape import Gradient, Tape, Term, terms_of

__all__ = ["NormTerm"]


@dataclass(frozen=True)
class NormTerm(Term):
    """The input gradient of a norm, still to be emitted so that a residual's gradient can ride along.

    `dy`, `x`, `rstd` and `gamma` are ids of the backward graph; `weight` is the gamma of the forward graph.
    """

    dy: int
    x: int
    rstd: int
    gamma: int
    weight: int

    combined_by = "rms_norm_backward"


@register
class RmsNorm(Op):
    """`x * rstd * gamma`; outputs y and rstd (kept for the backward pass)."""

    name = "rms_norm"
    signature = Signature(2, attributes={"eps": float})

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """y as x, rstd `[...]` in fp32."""
        x, gamma = inputs
        assert x is not None and gamma is not None
        require_floats("rms_norm", x, gamma)
        require_positive("rms_norm", eps=attrs["eps"])
        require(len(x.shape) > 1 and x.storage == "rows", "rms_norm", "x must be rows of elements", x, gamma)
        require(gamma.shape == x.shape[-1:], "rms_norm", "gamma must have the size of the last dim", x, gamma)
        return [
            TensorSpec(x.shape, x.dtype, x.labels),
            TensorSpec(x.shape[:-1], DTYPES["f32"], x.labels[:-1], storage="scalars"),
        ]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The normalised dim stays whole."""
        assert inputs[0] is not None
        rows = leading(inputs[0])
        return Factors(((*rows, "d"), ("d",)), ((*rows, "d"), rows), whole=frozenset("d"))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """One fused op gives dx (plus what flows past the norm) and dgamma."""
        x, gamma = op.given
        dy, rstd = incoming(op, grads), tape.use(op.outputs[1])
        return [NormTerm(dy, tape.use(x), rstd, tape.use(gamma), gamma), None]

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
            floats={"eps": op.attrs["eps"]},
        )


@register
class RmsNormBackward(Op):
    """Inputs dy, x, rstd, gamma, dresidual (or None); outputs dx and dgamma (fp32)."""

    name = "rms_norm_backward"
    combine_rank = 1  # behind the contractions: their sum is the residual that rides along
    accumulates = (1,)
    in_place = ((0, 0),)
    signature = Signature(5, absent=frozenset({4}))

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """dx as x, dgamma as gamma in fp32."""
        _, x, _, gamma, _ = inputs
        assert x is not None and gamma is not None
        return [TensorSpec(x.shape, x.dtype, x.labels), replace(gamma, dtype=DTYPES["f32"], name="")]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """dgamma contracts the rows."""
        assert inputs[1] is not None
        rows = leading(inputs[1])
        x = (*rows, "d")
        return Factors(
            (x, x, rows, ("d",), x if inputs[4] is not None else None),
            (x, ("d",)),
            whole=frozenset("d"),
            partials=(Partial("dgamma", rows, (1,), tree=LEAVES),),
        )

    def combine(self, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """Norm by norm, each adding what was summed before it; gamma gets its gradient on the way."""
        for t in terms_of(NormTerm, terms):
            total, dgamma = tape.op(self.name, [t.dy, t.x, t.rstd, t.gamma, total])
            tape.contribute(t.weight, dgamma)
        assert total is not None
        return total

    def lower(self, low: Lowering, op: OpNode) -> None:
        """dx and the leaf's partial of dgamma per row tile; then the tree over leaves and the reduction."""
        dy, x, rstd, gamma = op.given[:4]
        residual = op.inputs[4]
        t = low.tensor(x)
        leaf = low.leaf_temp(t.cols, "dgamma_leaves")
        low.emit(
            "rms_norm_backward",
            op,
            over=t,
            dtype=t.dtype,
            tiles={
                "dx": low.row(op.outputs[0]),
                "dgamma_leaf": low.row(leaf, div=low.leaf_rows),
                "dy": low.row(dy),
                "x": low.row(x),
                "rstd": low.row(rstd),
                "gamma": low.whole(gamma),
                "dresidual": low.row(residual) if residual is not None else None,
            },
            ints=low.leaf_cut,
        )
        low.leaf_tree(op, 1, leaf)
