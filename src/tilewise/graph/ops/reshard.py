"""Changes of layout as ops. `strategy.insert_reshards` adds such an op where a reader needs another
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
    """Base of these ops: one operand of any storage, and the axes of every dim may change."""

    signature = Signature(1)

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Weights are resharded as they are stored."""
        return True

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x."""
        (x,) = inputs
        assert x is not None
        return [TensorSpec(x.shape, x.dtype, x.labels, storage=x.storage)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """All dims are kept, and the axes of all may change."""
        (x,) = inputs
        assert x is not None
        dims = tuple(f"d{i}" for i in range(len(x.shape)))
        return Factors((dims,), (dims,), moved=frozenset(dims))


@register
class AllGather(Reshard):
    """Gathers the parts along the axes that the result's layout does not have, on every device."""

    name = "all_gather"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile, after all peers have their parts."""
        low.all_gather(op, op.given[0], op.outputs[0])


@register
class Slice(Reshard):
    """Keeps, on every device, its part along the axes that only the result's layout has. Nothing is
    transferred between devices.
    """

    name = "slice"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        low.slice(op, op.given[0], op.outputs[0])


@register
class Fetch(Reshard):
    """Fetches a tensor from the devices' files into memory."""

    name = "fetch"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per tile."""
        _move(low, op)


@register
class Store(Reshard):
    """Stores a tensor in the devices' files, from where `Fetch` reads it."""

    name = "store"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per tile."""
        _move(low, op)


@register
class PutBack(Op):
    """Stores a prefetched copy of a tensor in the devices' files. Inputs are the tensor and its
    copy in memory.
    """

    name = "put_back"
    signature = Signature(2)

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Tensors are stored as they are."""
        return True

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """No output: the tensor is written in place."""
        tensor, values = inputs
        assert tensor is not None and values is not None
        require(
            (tensor.shape, tensor.dtype) == (values.shape, values.dtype),
            self.name,
            "both operands must have one shape and dtype",
            *inputs,
        )
        return []

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Both have the same layout."""
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
    """Gathers the storage shards of a weight, whole panels of dim 0, on every device."""

    name = "all_gather_parameters"

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per tile of a storage shard."""
        low.all_gather_parameters(op, op.given[0], op.outputs[0])
