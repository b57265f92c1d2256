"""Passes: changes of a graph before it is scheduled, in two lists: of the graph without layouts, and
of the laid-out graph.

A pass is a pure function from a value to a value of the same type. It declares which properties it
relies on and which it establishes; a list in which a pass comes too early is rejected.
`docs/adding_a_pass.md` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tilewise.core.errors import PlanError
from tilewise.graph import (
    Differentiated,
    GraphBuilder,
    Recomputation,
    differentiate,
    recompute,
    simplify,
    split_backward,
)
from tilewise.graph.recomputation import SAVE_ALL
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.policy import DEFAULT_POLICY, ExecutionPolicy
from tilewise.ir.schedule import MakeSchedules
from tilewise.optim import Optimizer
from tilewise.plan import PlanSettings, choose_prefetched, schedule_graph, settings_for
from tilewise.processes.workers import WorkerPool
from tilewise.strategy import (
    FORWARD_ONLY,
    PipelineStages,
    StateSharding,
    divide_into_stages,
    gather_outputs,
    gather_table_rows,
    insert_reshards,
    move_activations,
    offload_tensors,
    one_stage,
    prefetch_states,
    resolve_stages,
    schedules_for,
    shard_states,
)

__all__ = [
    "GRAPH_PASSES",
    "PASSES",
    "GraphOptions",
    "LaidOut",
    "Pass",
    "PassOptions",
    "run_passes",
]

Value = TypeVar("Value")
Options = TypeVar("Options")


@dataclass(frozen=True)
class LaidOut:
    """A graph, the layouts of its tensors, how its batch is divided, and how its layers are divided
    into the stages of a pipeline.
    """

    graph: Graph
    layout: GraphLayout
    batch: BatchCut
    stages: PipelineStages | None = None

    def changed(self, graph_and_layout: tuple[Graph, GraphLayout]) -> LaidOut:
        """The same batch and stages with another graph and layout."""
        return LaidOut(*graph_and_layout, self.batch, self.stages)


@dataclass(frozen=True)
class PassOptions:
    """The settings that passes read, checked.

    Attributes:
        strict: reject reshards that no hint asks for.
        sharding: how state is sharded; None if it is not.
        offloaded: kinds of tensors that are stored in files.
        workers_per_device, is_checkpointed, rows_per_tile: as in `plan.settings_for`.
        stages: how layers are divided into the stages of a pipeline; None if they are not.
        policy: which workers run which tasks.
    """

    strict: bool = False
    sharding: StateSharding | None = None
    offloaded: frozenset[str] = frozenset()
    workers_per_device: int | None = None
    is_checkpointed: bool = False
    rows_per_tile: int | None = None
    stages: PipelineStages | None = None
    policy: ExecutionPolicy = DEFAULT_POLICY

    def schedules(self, laid_out: LaidOut) -> MakeSchedules:
        """The order of a step on each stage.

        Raises:
            LayoutError: the schedule does not fit the number of microbatches.
        """
        size, stages = laid_out.layout.num_stages, self.stages
        if stages is None or size == 1:
            return one_stage
        is_trained = any(op.phase == "backward" for op in laid_out.graph.ops)
        schedule = stages.schedule if is_trained else FORWARD_ONLY
        return schedules_for(schedule, size, stages.num_chunks, laid_out.batch.microbatches)

    def settings(self, laid_out: LaidOut) -> PlanSettings:
        """The plan's settings for a laid-out graph.

        Raises:
            PlanError, LayoutError: as `plan.settings_for`.
        """
        return settings_for(
            laid_out.graph,
            laid_out.layout,
            laid_out.batch,
            self.workers_per_device,
            self.is_checkpointed,
            self.rows_per_tile,
            self.policy,
        )


@dataclass(frozen=True)
class Pass(Generic[Value, Options]):
    """One change of a graph.

    Attributes:
        run: returns the changed graph, or the same object if nothing changes.
        needs: properties that earlier passes have established.
        gives: properties that hold afterwards.
    """

    run: Callable[[Value, Options], Value]
    needs: tuple[str, ...]
    gives: tuple[str, ...]


# ---- without layouts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphOptions:
    """The settings that passes of a graph without layouts read.

    Attributes:
        loss: the tensor to differentiate; None: the graph has no loss.
        optimizer: makes the update; None: the graph has none.
        recomputation: what the backward pass computes again.
        pool: worker processes that differentiate templates, if there are many.
        splits_backward: whether gradients of weights are calls of their own.
    """

    loss: int | None = None
    optimizer: Optimizer | None = None
    recomputation: Recomputation = SAVE_ALL
    pool: WorkerPool | None = None
    splits_backward: bool = False


def _simplify(made: Differentiated, _: GraphOptions) -> Differentiated:
    """Ops fused, and ops that nothing reads dropped."""
    return made._replace(graph=simplify(made.graph))


def _differentiate(made: Differentiated, options: GraphOptions) -> Differentiated:
    """The backward pass of the loss."""
    if options.loss is None:
        return made
    return differentiate(made.graph, options.loss, options.pool)


def _recompute(made: Differentiated, options: GraphOptions) -> Differentiated:
    """Results of layers computed again instead of saved."""
    return recompute(made, options.recomputation)


def _split_backward(made: Differentiated, options: GraphOptions) -> Differentiated:
    """Gradients of weights in calls of their own, which a pipeline may run later."""
    return split_backward(made) if options.splits_backward else made


def _add_update(made: Differentiated, options: GraphOptions) -> Differentiated:
    """The optimizer's update of every parameter."""
    if options.loss is None or options.optimizer is None:
        return made
    builder = GraphBuilder.thaw(made.graph)
    options.optimizer.add_to(builder, made.gradients)
    return made._replace(graph=builder.freeze())


GRAPH_PASSES: tuple[Pass[Differentiated, GraphOptions], ...] = (
    Pass(_simplify, (), ("fused ops",)),
    Pass(_differentiate, ("fused ops",), ("gradients",)),
    Pass(_recompute, ("gradients",), ("saved tensors",)),
    Pass(_split_backward, ("gradients", "saved tensors"), ("parts of the backward pass",)),
    Pass(_add_update, ("gradients", "saved tensors", "parts of the backward pass"), ("updates",)),
)
"""What `ComputeGraph.plan` runs before it solves layouts, in order."""


# ---- with layouts ------------------------------------------------------------------------------------------


def _insert_reshards(laid_out: LaidOut, options: PassOptions) -> LaidOut:
    """Operands in the layouts that their ops read."""
    return laid_out.changed(insert_reshards(laid_out.graph, laid_out.layout, strict=options.strict))


def _gather_table_rows(laid_out: LaidOut, _: PassOptions) -> LaidOut:
    """Gradients of tables from gathered rows, where that reads less."""
    return laid_out.changed(gather_table_rows(laid_out.graph, laid_out.layout, laid_out.batch))


def _move_activations(laid_out: LaidOut, options: PassOptions) -> LaidOut:
    """Results that layers of other stages read, moved to these stages."""
    if options.stages is None:
        return laid_out
    stages = resolve_stages(laid_out.graph, laid_out.layout, options.stages)
    return replace(laid_out, stages=stages).changed(move_activations(laid_out.graph, laid_out.layout, stages))


def _shard_states(laid_out: LaidOut, options: PassOptions) -> LaidOut:
    """Weights, gradients and optimizer states in storage shards."""
    if options.sharding is None:
        return laid_out
    return laid_out.changed(shard_states(laid_out.graph, laid_out.layout, options.sharding, laid_out.batch))


def _offload_tensors(laid_out: LaidOut, options: PassOptions) -> LaidOut:
    """Tensors in files, with calls that fetch and store them."""
    return laid_out.changed(
        offload_tensors(
            laid_out.graph, laid_out.layout, options.offloaded, laid_out.batch, int(options.policy.prefetch)
        )
    )


def _prefetch_states(laid_out: LaidOut, options: PassOptions) -> LaidOut:
    """Optimizer states prefetched into memory that the backward pass frees."""
    if "optimizer" not in options.offloaded or options.stages is not None or not options.policy.prefetch:
        return laid_out  # stages have memory of their own, which is not known yet
    scheduled = schedule_graph(laid_out.graph, laid_out.layout, options.settings(laid_out), one_stage)
    places = choose_prefetched(scheduled)
    return laid_out.changed(prefetch_states(laid_out.graph, laid_out.layout, places, laid_out.batch))


def _gather_outputs(laid_out: LaidOut, _: PassOptions) -> LaidOut:
    """Sharded outputs gathered on the device that the host reads."""
    return laid_out.changed(gather_outputs(laid_out.graph, laid_out.layout))


def _divide_into_stages(laid_out: LaidOut, options: PassOptions) -> LaidOut:
    """Every op in a stage of the pipeline, and all else that crosses stages moved."""
    if laid_out.stages is None:
        return laid_out
    return laid_out.changed(divide_into_stages(laid_out.graph, laid_out.layout, laid_out.stages))


PASSES: tuple[Pass[LaidOut, PassOptions], ...] = (
    Pass(_insert_reshards, (), ("operands agree",)),
    Pass(_gather_table_rows, ("operands agree",), ("gradients of tables",)),
    Pass(_move_activations, ("operands agree", "gradients of tables"), ("moved activations",)),
    Pass(_shard_states, ("operands agree", "gradients of tables"), ("storage layouts",)),
    Pass(_offload_tensors, ("storage layouts",), ("files",)),
    Pass(_prefetch_states, ("files",), ("states in memory",)),
    Pass(_gather_outputs, ("operands agree", "states in memory"), ("outputs on one device",)),
    Pass(_divide_into_stages, ("outputs on one device", "moved activations"), ("stages",)),
)
"""What `ComputeGraph.plan` runs on the laid-out graph, in order."""


def run_passes(value: Value, options: Options, passes: Sequence[Pass[Value, Options]]) -> Value:
    """Run passes in order.

    Raises:
        PlanError: a pass needs a property that no earlier pass gives.
        LayoutError, PlanError: as the passes.
    """
    established = set[str]()
    for one in passes:
        missing = [name for name in one.needs if name not in established]
        if missing:
            raise PlanError(
                f"[session.run_passes] a pass must come after those that establish what it needs; got "
                f"{one.run.__name__} before any that gives {', '.join(missing)}; change the order"
            )
        value = one.run(value, options)
        established.update(one.gives)
    return value
