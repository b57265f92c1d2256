"""Changes of layout as ops. `strategy.insert_reshards` adds them where a reader needs another
layout than the tensor has.

Values, shape and dtype do not change; the layouts of operand and result define the change. Layouts
are chosen after differentiation, so these ops need no gradient. Sums need no reshard op: a pending
reduction can deliver a sum in shards (a reduce-scatter).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.graph.ops.common import require
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering, Ref
from tilewise.ir.op import Factors, Op, Signature, register

__all__: list[str] = []


class Reshard(Op):
    """Base of all: one operand, any storage, every dim under a name of its own whose axes may change."""

    signature = Signature(1)

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Weights are resharded as they lie."""
        return True

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """As x."""
        (x,) = inputs
        assert x is not None
        return [TensorSpec(x.shape, x.dtype, x.labels, storage=x.storage)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """All dims stay, all may move."""
        (x,) = inputs
        assert x is not None
        dims = tuple(f"d{i}" for i in range(len(x.shape)))
        return Factors((dims,), (dims,), moved=frozenset(dims))


@register
class AllGather(Reshard):
    """The parts along the axes that the result's layout lacks come together on every device."""

    name = "all_gather"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile, once all peers have their parts."""
        low.all_gather(op, op.given[0], op.outputs[0])


@register
class Slice(Reshard):
    """Every device keeps its part along the axes that the result's layout has more; nothing moves between devices."""

    name = "slice"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        low.slice(op, op.given[0], op.outputs[0])


@register
class Fetch(Reshard):
    """A tensor that lies in the devices' files comes to memory."""

    name = "fetch"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per tile."""
        _move(low, op)


@register
class Store(Reshard):
    """A tensor goes to the devices' files, for `fetch` to bring again."""

    name = "store"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per tile."""
        _move(low, op)


@register
class PutBack(Op):
    """What stands for a tensor of the devices' files goes back there: inputs the tensor and what stands for it."""

    name = "put_back"
    signature = Signature(2)

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Tensors go as they lie."""
        return True

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """Nothing: the tensor is written in place."""
        tensor, values = inputs
        assert tensor is not None and values is not None
        require(
            (tensor.shape, tensor.dtype) == (values.shape, values.dtype), self.name, "both are alike", *inputs
        )
        return []

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Both are laid out alike."""
        (x, _) = inputs
        assert x is not None
        dims = tuple(f"d{i}" for i in range(len(x.shape)))
        return Factors((dims, dims), ())

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per tile."""
        tensor, values = op.given
        _emit_move(low, op, "store", source=low.flat(values), target=low.flat(tensor))


def _move(low: Lowering, op: OpNode) -> None:
    _emit_move(low, op, op.op, source=low.flat(op.given[0]), target=low.flat(op.outputs[0]))


def _emit_move(low: Lowering, op: OpNode, kernel: str, source: Ref, target: Ref) -> None:
    in_memory = source if kernel == "store" else target
    low.emit(
        kernel,
        op,
        over=target,
        step=in_memory.tile_rows,
        dtype=target.dtype,
        tiles={"out": low.row(target), "x": low.row(source)},
        priority=2,
    )


@register
class AllGatherParameters(Reshard):
    """The parts of a weight come together on every device, from their storage shards: whole panels of dim 0."""

    name = "all_gather_parameters"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per tile of a storage shard."""
        low.all_gather_parameters(op, op.given[0], op.outputs[0])
