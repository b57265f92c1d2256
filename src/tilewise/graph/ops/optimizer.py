"""The update of parameters as ops: the global gradient norm with its clipping scale, and AdamW.

Both run once per step, after all microbatches. They write their state in place and have no gradient. A step whose loss
or norm is not finite changes nothing: the scale is NaN then, and the update leaves every tensor as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.core.dtypes import DTYPES
from tilewise.graph.ops.common import fixed, require
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, Partial, Signature, register
from tilewise.ir.program import NumberLike

__all__: list[str] = []


def _whole(spec: TensorSpec | None, prefix: str) -> tuple[str, ...] | None:
    return tuple(f"{prefix}{i}" for i in range(len(spec.shape))) if spec is not None else None


@register
class GlobalNorm(Op):
    """Norm of all gradients and the scale that clips it: inputs the loss, then the gradients; output `[2]` fp32 (norm,
    scale). The scale is NaN when loss or norm is not finite.

    Every gradient gives one fp64 sum of squares per chunk of its labelled dim; devices that share a gradient fill in
    their chunks, all add all of them in one fixed tree.
    """

    name = "global_norm"
    signature = Signature(None, attributes={"max_norm": float})

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Gradients of weights lie as the weights do."""
        return position > 0

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """`[2]` fp32."""
        require(
            len(inputs) > 1 and all(s is not None and s.dtype.name == "f32" for s in inputs),
            self.name,
            "takes the loss and gradients, all f32",
            *inputs,
        )
        return [TensorSpec((2,), DTYPES["f32"], storage="vector")]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """A gradient may be sharded along the dim whose chunks it is summed by."""
        chunked = tuple(f"g{i}_{_chunked_dim(s)}" for i, s in enumerate(inputs) if s is not None)
        names = tuple(_whole(s, f"g{i}_") for i, s in enumerate(inputs))
        return Factors(names, (("o",),), partials=(Partial("squares", chunked, (0,), "or"),))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per gradient, one exchange of the sums, one task for the total."""
        chunks = low.reduction_chunks
        loss, *grads = op.given
        partials = low.temp(len(grads), chunks, "f64", tile_rows=1, name="squares")
        for i, grad in enumerate(grads):
            low.emit(
                "square_sum",
                op,
                over=partials,
                step=0,
                tiles={"out": low.row_at(partials, i), "grad": low.whole(grad)},
                ints={"num_chunks": chunks, **_chunks_of(low, grad, chunks)},
            )
        # every square_sum writes the table's tiles, so they run one after the other and the last stands for all
        for record in low.records(op, "squares"):
            shared = low.temp(len(grads), chunks, "f64", tile_rows=1, name="squares_shared")
            low.all_reduce(op, partials, shared, None, record, step=0)
            partials = shared
        low.emit(
            "norm_scale",
            op,
            over=low.one,
            step=0,
            tiles={"out": low.whole(op.outputs[0]), "partials": low.whole(partials), "loss": low.whole(loss)},
            floats={"max_norm": op.attrs["max_norm"]},
        )


def _chunked_dim(spec: TensorSpec) -> int | None:
    """The dim of a gradient that its sum of squares is cut along; None: it is not cut."""
    return next((d for d, label in enumerate(spec.labels) if label is not None), None)


def _chunks_of(low: Lowering, grad: int, chunks: int) -> dict[str, NumberLike | Sequence[NumberLike]]:
    """The dim that is cut and, per (global) chunk, the local elements of it that this device holds."""
    spec = low.spec(grad)
    dim = _chunked_dim(spec)
    if dim is not None:
        return {"split_dim": dim, "range": low.local_chunks(grad, dim)}
    rows = 1 if spec.storage == "vector" else fixed(spec.shape[0])
    return {"split_dim": 0, "range": [0, rows, *[0, 0] * (chunks - 1)]}
