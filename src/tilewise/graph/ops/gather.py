"""`gather`: collects the shards of an output on one device. The planner adds it after each sharded
output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.graph.ops.common import leading
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, Signature, register

__all__: list[str] = []


@register
class Gather(Op):
    """Collects a tensor whose last dim is sharded, on the first device along the axes that shard
    the dim.
    """

    name = "gather"
    signature = Signature(1)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x, without a label of the last dim."""
        (x,) = inputs
        assert x is not None
        return [TensorSpec(x.shape, x.dtype, (*x.labels[:-1], None))]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """The last dim is gathered."""
        (x,) = inputs
        assert x is not None
        rows = leading(x)
        names = ((*rows, "parts"),)
        return Factors(names, names, moved=frozenset({"parts"}))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile on the first device."""
        low.gather(op, op.given[0], op.outputs[0])
