"""`gather`: collects the shards of an output on one device. The planner adds it after each sharded
output.
"""

from __future__ import annotations

from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Op, Specs, operand, register, result

__all__: list[str] = []


@register
class Gather(Op):
    """Collects a tensor whose last dim is sharded, on the first device along the axes that shard
    the dim.
    """

    name = "gather"
    moved = "parts"
    x: int = operand("... parts", dtype="any")
    out: int = result("... parts", dtype="any")

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The spec of x, without a label of the last dim."""
        x = spec(self.x)
        return [TensorSpec(x.shape, x.dtype, (*x.labels[:-1], None))]

    def lower(self, low: Lowering) -> None:
        """One task per row tile on the first device."""
        low.gather(self.x, self.out)
