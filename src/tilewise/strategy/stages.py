"""Divides a laid-out graph into the stages of a pipeline, and adds the moves between them.

The layers are divided among virtual stages, in order. What comes before the first layer is in the
first virtual stage, what follows the last layer in the last one. A backward op is in the stage of
its layer, and an update in the stage that has the weight. So every stage has the weights, gradients
and optimizer states of its own layers only.

An op that reads a tensor of another stage reads the result of an op `move` instead. A weight that
several stages use, such as an embedding table that is also the output head, is stored in the first
of them. It is moved once per step, and the sum of its gradient in the other stage is moved back
once. The gradient norm is computed on all stages: each adds the squares of its own gradients, and
all exchange these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tilewise.core.tree import share_of
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.layout import EVERY_STAGE, K_SPLITS, GraphLayout, PendingReduction, StageLayout, TensorLayout
from tilewise.ir.reshards import is_prefetch
from tilewise.strategy.balance import divide_layers
from tilewise.strategy.strategy import PipelineStages

__all__ = ["divide_into_stages", "move_activations"]

_COPYING = ("all_gather_parameters", "fetch", "store", "put_back")


def move_activations(graph: Graph, layout: GraphLayout, stages: PipelineStages) -> tuple[Graph, GraphLayout]:
    """Return the graph, in which layers read results of other stages from moves, and its layout. Later
    passes may store what was moved in files.

    Raises:
        LayoutError: there are fewer layers than virtual stages, or not as many as `stages.layers`
            has.
    """
    if layout.mesh.size(stages.axis) == 1:
        return graph, layout
    return _Division(graph, layout, stages).with_moves(are_weights_moved=False)


def divide_into_stages(
    graph: Graph, layout: GraphLayout, stages: PipelineStages
) -> tuple[Graph, GraphLayout]:
    """Return the graph, in which all tensors that cross stages are moved, and its layout with stages.

    Raises:
        LayoutError: as `move_activations`.
    """
    if layout.mesh.size(stages.axis) == 1:
        return graph, layout
    return _Division(graph, layout, stages).with_moves(are_weights_moved=True)


class _Division:
    """The virtual stage of every op, and the moves between stages."""

    def __init__(self, graph: Graph, layout: GraphLayout, stages: PipelineStages) -> None:
        self.graph, self.layout, self.axis = graph, layout, stages.axis
        self.num_stages = layout.mesh.size(stages.axis)
        self.last = self.num_stages * stages.chunks - 1
        self.layers = [op for op in graph.ops if op.phase == "forward" and _is_layer(graph, op)]
        numbers = divide_layers(graph, self.layers, self.last + 1, stages.layers)
        stage_of_layer = [v for v, number in enumerate(numbers) for _ in range(number)]
        self.of_label = {op.label: stage for op, stage in zip(self.layers, stage_of_layer)}
        backward = (o.id for o in graph.ops if o.phase == "backward" and _is_layer(graph, o))
        self.first_backward = next(backward, len(graph.ops))
        self.stage: dict[int, int] = {}  # by op
        self.home: dict[int, int] = {}  # of parameters and states
        self.producer = {o: op.id for op in graph.ops for o in op.outputs}
        for op in graph.ops:
            if op.phase != "update" and not self._copies(op):
                self.stage[op.id] = self._stage_of(op)
        self._assign_copies("forward", "backward")
        self._find_homes()
        self._assign_updates()

    # ---- ops ----------------------------------------------------------------------------------------------

    def _copies(self, op: OpNode) -> bool:
        """Whether it is a call that only gathers, fetches or stores tensors."""
        return is_prefetch(self.graph, op, _COPYING)

    def _stage_of(self, op: OpNode) -> int:
        """The virtual stage of an op of the forward or the backward pass."""
        if op.op == "move":
            target: int = op.attrs["target"]
            return target
        if not self.layers:
            return 0
        if op.op == "call":
            stage = self.of_label.get(op.label.removesuffix(".backward"))
            if stage is not None:
                return stage
        if op.phase == "forward":
            if op.id < self.layers[0].id:
                return 0
            if op.id > self.layers[-1].id:
                return self.last
            return max(self._stages_of_results(op, "forward"), default=0)
        if op.id < self.first_backward:
            return self.last
        saved = [*self._stages_of_results(op, "forward")]
        return max(saved) if saved else min(self._stages_of_results(op, "backward"), default=0)

    def _stages_of_results(self, op: OpNode, phase: str) -> Iterator[int]:
        """Stages of the ops of a phase whose results an op reads; copies of weights do not count."""
        for t in op.given:
            producer = self.producer.get(t)
            if producer in self.stage and self.graph.ops[producer].phase == phase:
                yield self.stage[producer]

    def _assign_copies(self, *phases: str) -> None:
        """A copy belongs to the first stage that reads it; a stored tensor to the stage that made it."""
        readers: dict[int, list[int]] = {}
        for op in reversed(self.graph.ops):
            if op.phase in phases and self._copies(op):
                read_in = [stage for o in op.outputs for stage in readers.get(o, ())]
                made_in = [*self._stages_of_results(op, "forward"), *self._stages_of_results(op, "backward")]
                self.stage[op.id] = min(read_in or made_in, default=0)
            if op.id in self.stage:
                for t in op.given:
                    readers.setdefault(t, []).append(self.stage[op.id])

    def _find_homes(self) -> None:
        """A parameter is stored in the first stage that reads it. A call can fetch a parameter only
        from the file of its own stage, and then what it has fetched is moved.
        """
        files = frozenset(self.layout.files)
        fetches = [op for op in self.graph.ops if op.id in self.stage and not files.isdisjoint(op.given)]
        while True:
            first: dict[int, int] = {}
            for op in fetches:
                for t in op.given:
                    first[t] = min(self.stage[op.id], first.get(t, self.last))
            changed = {op.id: min(first[t] for t in op.given) for op in fetches}
            if all(self.stage[op] == stage for op, stage in changed.items()):
                break
            self.stage.update(changed)
        for op in self.graph.ops:
            if op.id in self.stage:
                for t in op.given:
                    if self.graph.tensors[t].kind == "parameter":
                        self.home[t] = min(self.stage[op.id], self.home.get(t, self.last))

    def _assign_updates(self) -> None:
        """An update runs where its parameter is stored, with the states that only it uses."""
        for op in self.graph.ops:
            if op.phase != "update":
                continue
            homes = {self.home[t] for t in op.given if t in self.home}
            self.stage[op.id] = min(homes) if homes else EVERY_STAGE
            for t in op.given:
                if homes and self.graph.tensors[t].kind == "state":
                    self.home.setdefault(t, min(homes))

    # ---- moves --------------------------------------------------------------------------------------------

    def with_moves(self, *, are_weights_moved: bool) -> tuple[Graph, GraphLayout]:
        """The graph with moves, and its layout. The layout has stages once weights are moved, too."""
        tensors, compute = list(self.graph.tensors), list(self.layout.compute)
        ops: list[OpNode] = []
        stages: list[int] = []
        numbers: dict[int, int] = {}
        moved: dict[
            tuple[int, int], int
        ] = {}  # tensor and stage (`EVERY_STAGE`: all) -> the result of the move
        stage_of_result = {o: self.stage[op.id] for op in self.graph.ops for o in op.outputs}
        for op in self.graph.ops:
            stage = self.stage[op.id]
            is_left = op.op == "move" or (not are_weights_moved and op.phase == "update")
            distributed = self._distributed(op) if stage == EVERY_STAGE else frozenset[int]()
            to = stage if stage == EVERY_STAGE else stage % self.num_stages
            inputs: list[int | None] = []
            for t in op.inputs:
                homes = self.home if are_weights_moved else {}
                source = None if t is None else homes.get(t, stage_of_result.get(t, EVERY_STAGE))
                if is_left or source is None or source == EVERY_STAGE or t in distributed:
                    inputs.append(t)
                    continue
                assert t is not None
                if to != EVERY_STAGE and source % self.num_stages == to:
                    inputs.append(t)
                    continue
                if (t, to) not in moved:
                    moved[t, to] = len(tensors)
                    spec = self.graph.spec(t)
                    label = f"move:{spec.name or self._label_of(t)}"
                    ends = {"source": source, "target": stage}
                    ops.append(OpNode(len(ops), "move", (t,), (len(tensors),), ends, op.phase, label))
                    stages.append(stage)
                    tensors.append(TensorNode(len(tensors), replace(spec, name=""), "result", -1))
                    compute.append(compute[t])
                inputs.append(moved[t, to])
            numbers[op.id] = len(ops)
            ops.append(replace(op, id=len(ops), inputs=tuple(inputs)))
            stages.append(stage)
        producer = {o: op.id for op in ops for o in op.outputs}
        made = tuple(replace(t, producer=producer.get(t.id)) for t in tensors)
        graph = replace(self.graph, tensors=made, ops=tuple(ops))
        layout = replace(
            self.layout,
            storage=tuple(compute),
            compute=tuple(compute),
            calls={numbers[op]: inner for op, inner in self.layout.calls.items()},
            pending_reductions=self._pending_reductions(graph, stages, numbers, compute, are_weights_moved),
        )
        if are_weights_moved:
            tensors_of = self._stages_of_tensors(graph, stages)
            layout = replace(layout, stages=StageLayout(self.axis, tuple(stages), tensors_of))
        return graph, layout

    def _label_of(self, tensor: int) -> str:
        producer = self.graph.tensors[tensor].producer
        return "a result" if producer is None else self.graph.ops[producer].label

    def _distributed(self, op: OpNode) -> frozenset[int]:
        """Operands of an op on all stages of which each stage may have some and lack others: those
        whose dims devices may share without a sum. A tensor of one element has no parts.
        """
        if op.op == "call":
            return frozenset()
        factors = factors_of(self.graph, op)
        divisible = {d for p in factors.partial_values if p.combine == "or" for d in p.factors}
        return frozenset(
            t
            for t, dims in zip(op.inputs, factors.inputs)
            if t is not None and dims and divisible.intersection(dims) and self.graph.spec(t).shape != (1,)
        )

    def _pending_reductions(
        self,
        graph: Graph,
        stages: Sequence[int],
        numbers: Mapping[int, int],
        compute: Sequence[TensorLayout],
        are_weights_moved: bool,
    ) -> dict[tuple[int, str], tuple[PendingReduction, ...]]:
        """Those of the graph without moves, and one over the stages for each value of which every
        stage has a part.
        """
        made = {
            (numbers[op], partial): tuple(replace(pending, op=numbers[op]) for pending in group)
            for (op, partial), group in self.layout.pending_reductions.items()
        }
        size = self.num_stages
        for op in graph.ops if are_weights_moved else ():
            if stages[op.id] != EVERY_STAGE or op.op in ("call", "move"):
                continue
            for partial in factors_of(graph, op).partial_values:
                if partial.combine == "or":
                    leaf_ranges = (tuple(share_of(size, size, i) for i in range(size)),)
                    arrives = tuple(compute[op.outputs[o]] for o in partial.outputs)
                    pending = PendingReduction(
                        op.id,
                        partial.name,
                        "or",
                        partial.outputs,
                        K_SPLITS,
                        size,
                        (self.axis,),
                        leaf_ranges,
                        arrives,
                    )
                    made[op.id, partial.name] = (*made.get((op.id, partial.name), ()), pending)
        return made

    def _stages_of_tensors(self, graph: Graph, stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The stages that have each tensor: a result where it is computed, all others where they are
        read or stored.
        """
        every = tuple(range(self.num_stages))
        used: list[set[int]] = [set() for _ in graph.tensors]
        for op in graph.ops:
            own = every if stages[op.id] == EVERY_STAGE else (stages[op.id] % self.num_stages,)
            for t in op.outputs:
                used[t].update(own)
            for t in op.given if op.op != "move" else ():
                if graph.tensors[t].kind != "result" and t not in self.home:
                    used[t].update(own)
        for t, stage in self.home.items():
            used[t].add(stage % self.num_stages)
        return tuple(tuple(sorted(of)) or (0,) for of in used)


def _is_layer(graph: Graph, op: OpNode) -> bool:
    return op.op == "call" and not is_prefetch(graph, op, _COPYING)
