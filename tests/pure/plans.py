"""Training steps planned without native code: shared by the tests of graphs, layouts and plans."""

from __future__ import annotations

from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder, Recomputation, differentiate, simplify, split_backward
from tilewise.graph import recompute as recomputed
from tilewise.ir.batch import cut_batch
from tilewise.ir.graph import Graph
from tilewise.optim import AdamW, Optimizer
from tilewise.plan import PlanTables, make_plan, settings_for
from tilewise.processes.workers import WorkerPool
from tilewise.strategy import (
    DistributionStrategy,
    PipelineStages,
    divide_into_stages,
    gather_outputs,
    gather_table_rows,
    insert_reshards,
    move_activations,
    one_stage,
    propagate_layouts,
    resolve_stages,
    schedules_for,
    shard_states,
)


def with_update(
    builder: GraphBuilder,
    optimizer: Optimizer | None = None,
    recompute: object = "none",
    pool: WorkerPool | None = None,
    *,
    splits_backward: bool = False,
) -> Graph:
    """A builder's graph with gradients of its loss and an optimizer's update."""
    recomputation = Recomputation.of(recompute)
    made = differentiate(simplify(builder.freeze()), builder.draft.loss_id, pool)
    made = recomputed(made, recomputation)
    made = split_backward(made) if splits_backward else made
    thawed = GraphBuilder.thaw(made.graph)
    (optimizer or AdamW()).add_to(thawed, made.gradients)
    return thawed.freeze()


def plan_graph(
    graph: Graph,
    axes: dict[str, int],
    accumulation: int = 1,
    *,
    batch_splits: int | None = None,
    workers: int = 1,
    optimizer: Optimizer | None = None,
    pool: WorkerPool | None = None,
    stages: PipelineStages | None = None,
) -> PlanTables:
    """The plan of a complete graph over a mesh of these axes."""
    mesh = DeviceMesh(axes)
    batch = cut_batch(graph, accumulation, batch_splits)
    strategy = DistributionStrategy.for_mesh(mesh, stages=stages)
    graph, layout = insert_reshards(graph, propagate_layouts(graph, mesh, strategy, batch))
    graph, layout = gather_table_rows(graph, layout, batch)
    stages, schedule = strategy.stages, one_stage
    if stages is not None:
        stages = resolve_stages(graph, layout, stages)
        graph, layout = move_activations(graph, layout, stages)
        schedule = schedules_for(stages.schedule, mesh.size(stages.axis), stages.num_chunks, accumulation)
    if strategy.sharding is not None:
        graph, layout = shard_states(graph, layout, strategy.sharding, batch)
    graph, layout = gather_outputs(graph, layout)
    if stages is not None:
        graph, layout = divide_into_stages(graph, layout, stages)
    settings = settings_for(graph, layout, batch, workers)
    return make_plan(graph, layout, settings, schedule, optimizer, pool=pool)
