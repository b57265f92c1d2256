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

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewise.core.errors import InternalError
from tilewise.core.tree import node_shares
from tilewise.ir.batch_sums import find_batch_sums
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.layout import EVERY_STAGE, K_SPLITS, GraphLayout, PendingReduction, StageLayout
from tilewise.ir.reshards import COPYING, is_layer, is_prefetch
from tilewise.ir.tape import WEIGHT_PART
from tilewise.strategy.balance import divide_layers
from tilewise.strategy.strategy import PipelineStages

__all__ = ["divide_into_stages", "move_activations", "resolve_stages"]


def resolve_stages(graph: Graph, layout: GraphLayout, stages: PipelineStages) -> PipelineStages:
    """The stages with a number of layers for each virtual stage. Later passes add ops, which must not
    change the division.

    Raises:
        LayoutError: there are fewer layers than virtual stages, or not as many as `stages.layers`
            has.
    """
    layers = [op for op in graph.ops if op.phase == "forward" and is_layer(graph, op)]
    numbers = divide_layers(graph, layers, layout.mesh.size(stages.axis) * stages.num_chunks, stages)
    return replace(stages, layers=numbers, first_stage_less_layers=None, last_stage_less_layers=None)


def move_activations(graph: Graph, layout: GraphLayout, stages: PipelineStages) -> tuple[Graph, GraphLayout]:
    """Return the graph, in which layers read results of other stages from moves, and its layout. Later
    passes may store what was moved in files.

    Args:
        stages: as `resolve_stages` returns them.
    """
    if layout.mesh.size(stages.axis) == 1:
        return graph, layout
    return _Division(graph, layout, stages).with_moves(are_weights_moved=False)


def divide_into_stages(
    graph: Graph, layout: GraphLayout, stages: PipelineStages
) -> tuple[Graph, GraphLayout]:
    """Return the graph, in which all tensors that cross stages are moved, and its layout with stages.

    Args:
        stages: as `resolve_stages` returns them.
    """
    if layout.mesh.size(stages.axis) == 1:
        return graph, layout
    return _Division(graph, layout, stages).with_moves(are_weights_moved=True)


class _Adding:
    """A graph under construction, to which moves are added.

    Attributes:
        compute: per tensor, its layout.
        stages: per op, its virtual stage.
        weight_part: ops that only lead to gradients of weights.
    """

    def __init__(self, graph: Graph, layout: GraphLayout) -> None:
        self.before = graph
        self.tensors, self.compute = list(graph.tensors), list(layout.compute)
        self.ops: list[OpNode] = []
        self.stages: list[int] = []
        self.weight_part: set[int] = set()
        self.labels = {o: op.label for op in graph.ops for o in op.outputs}  # of the ops that made results
        self._moved: dict[tuple[int, int], int] = {}  # tensor and receiver -> the result of the move

    def append(self, op: OpNode, stage: int, is_weight_part: bool) -> int:
        """Append an op; returns its number."""
        number = len(self.ops)
        self.ops.append(replace(op, id=number))
        self.stages.append(stage)
        if is_weight_part:
            self.weight_part.add(number)
        return number

    def moved(self, tensor: int, ends: tuple[int, int], to: int, reader: OpNode, is_weight_part: bool) -> int:
        """What a tensor of another stage is called in a stage. The first reader's move is for all.

        Args:
            tensor: the tensor.
            ends: the virtual stages that send and receive.
            to: names the receiver among those of the tensor.
            reader: the op that reads it.
            is_weight_part: whether the reader only leads to gradients of weights.
        """
        if (tensor, to) not in self._moved:
            self._moved[tensor, to] = result = len(self.tensors)
            node = self.tensors[tensor]
            of = "" if node.producer is None else self.labels[tensor]
            label = f"move:{node.spec.name or of}"
            attrs = {"source": ends[0], "target": ends[1]}
            move = OpNode(-1, "move", (tensor,), (result,), attrs, self._phase(tensor, ends, reader), label)
            self.append(move, ends[1], is_weight_part)
            self.labels[result] = of
            self.tensors.append(TensorNode(result, replace(node.spec, name=""), "result", -1))
            self.compute.append(self.compute[tensor])
        return self._moved[tensor, to]

    def passed_on(self, tensor: int, ends: tuple[int, int], reader: OpNode) -> int:
        """What a result of each microbatch is called in a virtual stage that reads it: it is passed on
        from stage to stage. Otherwise a stage could wait for a later stage that has not begun this
        microbatch. Its move never belongs to the gradients of weights, which stages compute in any order.
        """
        source, target = ends
        step = 1 if target > source else -1
        for stage in range(source + step, target + step, step):
            key = -2 - stage  # numbers of stages name what moves once
            tensor = self.moved(tensor, (stage - step, stage), key, reader, False)
        return tensor

    def _phase(self, tensor: int, ends: tuple[int, int], reader: OpNode) -> str:
        """Results of the forward pass move forwards in it, even if only the backward pass reads them."""
        producer = self.before.tensors[tensor].producer if tensor < len(self.before.tensors) else None
        is_forward = producer is not None and self.before.ops[producer].phase == "forward"
        return "forward" if is_forward and EVERY_STAGE < ends[0] < ends[1] else reader.phase

    def weight_flags(self) -> tuple[bool, ...]:
        """Per op, whether it only leads to gradients of weights; empty without such ops."""
        return (
            tuple(number in self.weight_part for number in range(len(self.ops))) if self.weight_part else ()
        )

    def graph(self) -> Graph:
        """The new graph."""
        producer = {o: op.id for op in self.ops for o in op.outputs}
        tensors = tuple(replace(t, producer=producer.get(t.id)) for t in self.tensors)
        return replace(self.before, tensors=tensors, ops=tuple(self.ops))


class _Division:
    """The virtual stage of every op, and the moves between stages."""

    def __init__(self, graph: Graph, layout: GraphLayout, stages: PipelineStages) -> None:
        self.graph, self.layout, self.axis = graph, layout, stages.axis
        self.num_stages = layout.mesh.size(stages.axis)
        self.last = self.num_stages * stages.num_chunks - 1
        self.layers = [op for op in graph.ops if op.phase == "forward" and is_layer(graph, op)]
        self.stage_of_layer = self._stages_of_layers(stages.layers)
        backward = (o.id for o in graph.ops if o.phase == "backward" and is_layer(graph, o))
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
        self.once = self._find_once()
        self.weight_part = self._find_weight_part() if stages.splits_backward else frozenset[int]()

    def _stages_of_layers(self, numbers: tuple[int, ...] | str | None) -> dict[int, int]:
        """The virtual stage of every layer's call in both passes, by op. A layer that is called several
        times is differentiated in reverse order.
        """
        assert isinstance(numbers, tuple)  # `resolve_stages` has divided them
        stages = [v for v, number in enumerate(numbers) for _ in range(number)]
        by_op = {op.id: stage for op, stage in zip(self.layers, stages)}
        calls: dict[str, list[int]] = {}  # stages of the calls with one label that have no backward pass yet
        for op, stage in zip(self.layers, stages):
            calls.setdefault(op.label, []).append(stage)
        last: dict[str, int] = {}
        for op in self.graph.ops:
            if op.phase != "backward" or not is_layer(self.graph, op):
                continue
            label = op.label.removesuffix(WEIGHT_PART).removesuffix(".backward")
            if not op.label.endswith(WEIGHT_PART) and calls.get(label):
                last[label] = calls[label].pop()
            if label in last:
                by_op[op.id] = last[label]
        return by_op

    # ---- ops ----------------------------------------------------------------------------------------------

    def _copies(self, op: OpNode) -> bool:
        """Whether it is a call that only gathers, fetches or stores tensors."""
        return is_prefetch(self.graph, op, COPYING)

    def _stage_of(self, op: OpNode) -> int:
        """The virtual stage of an op of the forward or the backward pass."""
        if op.op == "move":
            target: int = op.attrs["target"]
            return target
        if not self.layers:
            return 0
        if op.id in self.stage_of_layer:
            return self.stage_of_layer[op.id]
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

    def _find_weight_part(self) -> frozenset[int]:
        """The ops of the backward pass on which neither a gradient of another layer's input nor another
        stage depends.
        """
        source = {o: self.stage[op.id] for op in self.graph.ops for o in op.outputs}
        needed: set[int] = set()  # tensors on which such a gradient or another stage depends
        weight_part = set()
        for op in reversed(self.graph.ops):
            if op.phase != "backward":
                continue
            is_needed = is_layer(self.graph, op) and not op.label.endswith(WEIGHT_PART)
            is_needed |= op.op == "move" and self.once.isdisjoint(op.given)
            if is_needed or not needed.isdisjoint(op.outputs):
                needed.update(op.given)
            else:
                weight_part.add(op.id)
                others = (t for t in op.given if t in source and t not in self.once)
                needed.update(t for t in others if self._crosses(source[t], self.stage[op.id]))
        return frozenset(weight_part)

    # ---- moves --------------------------------------------------------------------------------------------

    def with_moves(self, *, are_weights_moved: bool) -> tuple[Graph, GraphLayout]:
        """The graph with moves, and its layout. The layout has stages once weights are moved, too."""
        source = {o: self.stage[op.id] for op in self.graph.ops for o in op.outputs}
        source |= self.home if are_weights_moved else {}
        adding = _Adding(self.graph, self.layout)
        numbers: dict[int, int] = {}
        for op in self.graph.ops:
            stage = self.stage[op.id]
            may_stay = op.op == "move" or (not are_weights_moved and op.phase == "update")
            stays = frozenset(op.given) if may_stay else self._distributed(op, stage)
            inputs = [
                t
                if t is None or t in stays or not self._crosses(source.get(t, EVERY_STAGE), stage)
                else self._moved(adding, t, (source[t], stage), op)
                for t in op.inputs
            ]
            numbers[op.id] = adding.append(
                replace(op, inputs=tuple(inputs)), stage, op.id in self.weight_part
            )
        graph = adding.graph()
        compute = tuple(adding.compute)
        layout = replace(
            self.layout,
            storage=compute,
            compute=compute,
            calls={numbers[op]: inner for op, inner in self.layout.calls.items()},
            pending_reductions={
                (numbers[op], partial): tuple(replace(pending, op=numbers[op]) for pending in group)
                for (op, partial), group in self.layout.pending_reductions.items()
            },
        )
        return graph, self._with_stages(graph, layout, adding) if are_weights_moved else layout

    def _moved(self, adding: _Adding, tensor: int, ends: tuple[int, int], reader: OpNode) -> int:
        """What an op reads instead of a tensor of another stage. Weights, sums over the batch, and what
        all stages read move once per step, directly.
        """
        is_weight_part = reader.id in self.weight_part
        if tensor in self.once or EVERY_STAGE in ends:
            return adding.moved(tensor, ends, self._device_stage(ends[1]), reader, is_weight_part)
        return adding.passed_on(tensor, ends, reader)

    def _find_once(self) -> frozenset[int]:
        """Tensors that have one value per step: weights, copies of them, and sums over the batch."""
        constant = {t.id for t in self.graph.tensors if t.kind in ("parameter", "state")}
        for op in self.graph.ops:
            if self._copies(op) and constant.issuperset(op.given):
                constant.update(op.outputs)
        return frozenset(constant) | find_batch_sums(self.graph).complete_last

    def _device_stage(self, stage: int) -> int:
        return stage if stage == EVERY_STAGE else stage % self.num_stages

    def _crosses(self, source: int, stage: int) -> bool:
        """Whether an op of a virtual stage reads a tensor that another stage has."""
        return source != EVERY_STAGE and self._device_stage(source) != self._device_stage(stage)

    def _with_stages(self, graph: Graph, layout: GraphLayout, adding: _Adding) -> GraphLayout:
        """The layout with stages, and with a pending reduction over the stages for each value of which
        every stage has a part.
        """
        size, made = self.num_stages, dict(layout.pending_reductions)
        for op in graph.ops:
            if adding.stages[op.id] != EVERY_STAGE or op.op in ("call", "move"):
                continue
            for partial in factors_of(graph, op).partial_values:
                if partial.combine != "or":
                    continue
                pending = PendingReduction(
                    op.id,
                    partial.name,
                    partial.combine,
                    partial.outputs,
                    K_SPLITS,
                    size,
                    (self.axis,),
                    (node_shares(size, size),),
                    tuple(layout.compute[op.outputs[o]] for o in partial.outputs),
                )
                made[op.id, partial.name] = (*made.get((op.id, partial.name), ()), pending)
        tensors = self._stages_of_tensors(graph, adding.stages)
        for op in graph.ops:
            if op.op == "move" and op.attrs["source"] % size not in tensors[op.inputs[0] or 0]:
                raise InternalError(
                    f"[strategy.stages] a stage must have what it sends; got {op.label!r} from virtual stage "
                    f"{op.attrs['source']}, which does not; please report the graph"
                )
        stages = StageLayout(self.axis, tuple(adding.stages), tensors, adding.weight_flags())
        return replace(layout, pending_reductions=made, stages=stages)

    def _distributed(self, op: OpNode, stage: int) -> frozenset[int]:
        """Operands of an op on all stages of which each stage may have some and lack others: those
        whose dims devices may share without a sum. A tensor of one element has no parts.
        """
        if stage != EVERY_STAGE or op.op == "call":
            return frozenset()
        factors = factors_of(self.graph, op)
        divisible = {d for p in factors.partial_values if p.combine == "or" for d in p.factors}
        return frozenset(
            t
            for t, dims in zip(op.inputs, factors.inputs)
            if t is not None and dims and divisible.intersection(dims) and self.graph.spec(t).shape != (1,)
        )

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
