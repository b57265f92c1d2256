"""Changes of layout as ops. `strategy.insert_reshards` adds such an op where a reader needs another
layout than the tensor has.

Values, shape and dtype do not change; the layouts of operand and result define the change. Layouts
are chosen after differentiation, so these ops need no gradient. Sums need no reshard op: a pending
reduction can deliver a sum in shards (a reduce-scatter).
"""

from __future__ import annotations

from tilewise.graph.ops.common import require
from tilewise.ir.lowering import Lowering, Ref
from tilewise.ir.op import Op, Specs, operand, register, result

__all__: list[str] = []


class Reshard(Op):
    """Base of these ops: one operand of any type and storage, and the axes of every dim may change."""

    moved = "..."
    x: int = operand("...", dtype="any", packed=True)
    out: int = result(like="x", dtype="any", indices_of="x")


@register
class AllGather(Reshard):
    """Gathers the parts along the axes that the result's layout does not have, on every device."""

    name = "all_gather"

    def lower(self, low: Lowering) -> None:
        """One task per row tile, after all peers have their parts."""
        low.all_gather(self.x, self.out)


@register
class Slice(Reshard):
    """Keeps, on every device, its part along the axes that only the result's layout has. Nothing is
    transferred between devices.
    """

    name = "slice"

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        low.slice(self.x, self.out)


@register
class Fetch(Reshard):
    """Fetches a tensor from the devices' files into memory."""

    name = "fetch"

    def lower(self, low: Lowering) -> None:
        """One task per tile."""
        source, target = low.flat(self.x), low.flat(self.out)
        _move(low, "fetch", source, target, in_memory=target)


@register
class Store(Reshard):
    """Stores a tensor in the devices' files, from where `Fetch` reads it."""

    name = "store"

    def lower(self, low: Lowering) -> None:
        """One task per tile."""
        source, target = low.flat(self.x), low.flat(self.out)
        _move(low, "store", source, target, in_memory=source)


@register
class PutBack(Op):
    """Stores a prefetched copy of a tensor (`values`, in memory) in the devices' files."""

    name = "put_back"
    tensor: int = operand("...", dtype="any", packed=True)
    values: int = operand("...", dtype="any", packed=True)

    def check(self, spec: Specs) -> None:
        """Both have one dtype."""
        tensor, values = spec(self.tensor), spec(self.values)
        require(tensor.dtype == values.dtype, self.name, "operands must have one dtype", tensor, values)

    def lower(self, low: Lowering) -> None:
        """One task per tile."""
        source, target = low.flat(self.values), low.flat(self.tensor)
        _move(low, "store", source, target, in_memory=source)


def _move(low: Lowering, kernel: str, source: Ref, target: Ref, *, in_memory: Ref) -> None:
    tiles = {"out": low.row(target), "x": low.row(source)}
    low.emit(kernel, over=target, step=in_memory.tile_rows, dtype=target.dtype, tiles=tiles, priority=2)


@register
class Move(Reshard):
    """Copies a tensor from one stage of a pipeline to another, or to every stage.

    Attributes:
        source: the virtual stage that sends.
        target: the virtual stage that receives; `EVERY_STAGE` for all.
    """

    name = "move"
    source: int
    target: int

    def lower(self, low: Lowering) -> None:
        """One task per tile on every receiver."""
        low.move(self.x, self.out)


@register
class AllGatherParameters(Reshard):
    """Gathers the storage shards of a weight, whole panels of dim 0, on every device."""

    name = "all_gather_parameters"

    def lower(self, low: Lowering) -> None:
        """One task per tile of a storage shard."""
        low.all_gather_parameters(self.x, self.out)
