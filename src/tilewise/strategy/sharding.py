"""Sharded state (FSDP, ZeRO): weights, gradients and optimizer states are stored in shards and
gathered for use.

Propagation lays out the graph as if every device of a sharding axis had whole weights. That is the
compute layout. This module divides each weight along dim 0, in whole panels (blocks of 32 rows),
into *storage shards*, one per device. The weight's gradient and optimizer states are divided in the
same way. Readers of the weight then read what `all_gather_parameters` has gathered. The sum that
computes its gradient is delivered in shards, and the update works on shards. Nothing else changes,
so the bits of results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tilewise.core.errors import LayoutError
from tilewise.ir.batch import BatchCut
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout, show_layout
from tilewise.ir.op import op_named
from tilewise.strategy.pending_reductions import make_pending_reductions
from tilewise.strategy.prefetch import Prefetching, UnitChoice
from tilewise.strategy.strategy import StateSharding

__all__ = ["shard_states"]


def shard_states(
    graph: Graph, layout: GraphLayout, sharding: StateSharding, batch: BatchCut
) -> tuple[Graph, GraphLayout]:
    """Return a graph with calls that gather weights, and a layout in which weights, gradients and
    states are stored in shards.

    Raises:
        LayoutError: there is no weight to shard, or a gradient is computed by ops that cannot
            deliver it in shards.
    """
    axes = tuple(axis for axis in sharding.axes if layout.mesh.size(axis) > 1)
    if not axes:
        return graph, layout
    return _Sharding(graph, layout, replace(sharding, axes=axes), batch).run()


class _Sharding(Prefetching):
    """Adds storage shards to a graph."""

    def __init__(self, graph: Graph, layout: GraphLayout, sharding: StateSharding, batch: BatchCut) -> None:
        choice = UnitChoice(
            sharding.prefetch, not sharding.reshard_after_forward, sharding.units, sharding.unit_elements
        )
        super().__init__(
            graph, replace(layout, storage_axes=sharding.axes), batch, choice, "all_gather_parameters"
        )
        self.sharding = sharding

    def run(self) -> tuple[Graph, GraphLayout]:
        """Sets storage shards, adds calls of `all_gather_parameters`, then updates layouts and
        pending reductions.
        """
        weights = [t.id for t in self.graph.of_kind("parameter") if self._is_cut(t.spec, self.compute[t.id])]
        if not weights:
            raise LayoutError(
                "[strategy.shard_states] sharded state needs weights, which are divided in panels of 32 rows (vectors "
                f"stay whole); got no weight in {self.graph.name!r}; use a strategy without sharded state"
            )
        self._set_storage(weights)
        return self.insert_prefetches(weights)

    # ---- storage shards --------------------------------------------------------------------------------------------

    def _is_cut(self, spec: TensorSpec, compute: TensorLayout) -> bool:
        """Whether a tensor is stored in panels. Tensors in panels are sharded; with few panels some
        devices have an empty storage shard. Vectors have no panels and are not sharded.
        """
        if spec.storage != "packed" or not isinstance(spec.shape[0], int):
            return False
        twice = [axis for axes in compute for axis in axes if axis in self.sharding.axes]
        if twice:
            raise LayoutError(
                "[strategy.shard_states] an axis of storage shards must not shard a weight where it is used; got "
                f"{spec.name!r} as {show_layout(compute)}, and {twice[0]!r} for storage shards; drop the hint on it"
            )
        return True

    def _storage_of(self, compute: TensorLayout) -> TensorLayout:
        return ((*compute[0], *self.sharding.axes), *compute[1:])

    def _set_storage(self, weights: Sequence[int]) -> None:
        """Set the storage layout of a weight, of the states that its update writes, and of its
        gradient.
        """
        shards = {weight: self._storage_of(self.compute[weight]) for weight in weights}
        pending: list[int] = []
        for op in self.graph.ops:
            if op.phase == "update":
                for group in self._written_alike(self.graph, op):
                    storage = next((shards[t] for t in group if t in shards), None)
                    if storage is not None:
                        shards.update(dict.fromkeys(group, storage))
                        pending += [t for t in group if self.graph.tensors[t].kind == "result"]
        producers = {o: op for op in self.graph.ops for o in op.outputs}
        while pending:
            gradient = pending.pop()
            for source in _sources(self.graph, producers[gradient], gradient):
                if source not in shards:
                    shards[source] = shards[gradient]
                    pending.append(source)
        for tensor, storage in shards.items():
            self.compute[tensor] = storage

    def _written_alike(self, graph: Graph, op: OpNode) -> Iterator[list[int]]:
        """Tensors of the root graph that an update writes, or reads element by element."""
        if op.op == "call":
            template = graph.templates[op.attrs["template"]]
            bound = dict(zip(template.arguments, op.inputs))
            for inner in template.graph.ops:
                for group in self._written_alike(template.graph, inner):
                    yield [t for i in group if (t := bound.get(i)) is not None]
        elif not op.outputs:
            names = factors_of(graph, op).inputs
            alike = [t for t, dims in zip(op.inputs, names) if t is not None and dims and dims == names[0]]
            yield alike

    def _inside(self, op: OpNode, layout: GraphLayout) -> GraphLayout:
        template = self.templates[op.attrs["template"]]
        seen = (*template.arguments, *template.results, *op.attrs["saved"])
        outside = (*op.inputs, *op.outputs)
        changed = tuple(
            (t, self.compute[o])
            for t, o in zip(seen, outside)
            if o is not None and layout.compute[t] != self.compute[o]
        )
        key = id(layout), changed
        if key not in self.inner:
            self.inner[key] = self._changed(template.graph, layout, dict(changed))
        return self.inner[key]

    def _changed(self, graph: Graph, layout: GraphLayout, changed: Mapping[int, TensorLayout]) -> GraphLayout:
        if not changed:
            return layout
        compute = list(layout.compute)
        pending = list(changed.items())
        producers = {o: op for op in graph.ops for o in op.outputs}
        while pending:
            tensor, storage = pending.pop()
            if compute[tensor] == storage:
                continue
            compute[tensor] = storage
            if tensor in producers:
                pending += [(t, storage) for t in _sources(graph, producers[tensor], tensor)]
        pending_reductions = make_pending_reductions(graph, compute, self.mesh, self.batch)
        return replace(
            layout, storage=tuple(compute), compute=tuple(compute), pending_reductions=pending_reductions
        )


def _sources(graph: Graph, op: OpNode, gradient: int) -> list[int]:
    """The tensors that a gradient is computed from, up to the sums over the batch (which are
    delivered in shards), and the tensors that these are added to.
    """
    if op.op == "call":
        return []
    declared, output = op_named(op.op).declared, op.outputs.index(gradient)
    if output in declared.accumulates:
        over = (op.inputs[operand] for result, operand in declared.in_place if result == output)
        return [t for t in over if t is not None]
    factors = factors_of(graph, op)
    (dims,) = factors.outputs
    alike = [t for t, names in zip(op.inputs, factors.inputs) if t is not None and names == dims]
    if factors.partial_values or len(alike) != len(op.given):
        raise LayoutError(
            "[strategy.shard_states] the gradient of a sharded weight must be a sum over the batch, or computed "
            f"from such sums element by element; got {op.label!r} ({op.op}); leave that weight "
            "out of the graph, or use another strategy"
        )
    return alike
