"""Training steps planned without native code: shared by the tests of graphs, layouts and plans."""

from __future__ import annotations

from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder, Recomputation, differentiate, simplify
from tilewise.graph import recompute as recomputed
from tilewise.ir.batch import cut_batch
from tilewise.ir.graph import Graph
from tilewise.optim import AdamW, Optimizer
from tilewise.plan import PlanTables, make_plan, settings_for
from tilewise.processes.workers import WorkerPool
from tilewise.strategy import (
    DistributionStrategy,
    gather_outputs,
    gather_table_rows,
    insert_reshards,
    one_stage,
    propagate_layouts,
    shard_states,
)


def with_update(
    builder: GraphBuilder,
    optimizer: Optimizer | None = None,
    recompute: object = "none",
    pool: WorkerPool | None = None,
) -> Graph:
    """A builder's graph with gradients of its loss and an optimizer's update."""
    recomputation = Recomputation.of(recompute)
    made = differentiate(simplify(builder.freeze()), builder.draft.loss_id, pool)
    made = recomputed(made, recomputation)
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
) -> PlanTables:
    """The plan of a complete graph over a mesh of these axes."""
    mesh = DeviceMesh(axes)
    batch = cut_batch(graph, accumulation, batch_splits)
    strategy = DistributionStrategy.for_mesh(mesh)
    graph, layout = insert_reshards(graph, propagate_layouts(graph, mesh, strategy, batch))
    graph, layout = gather_table_rows(graph, layout, batch)
    if strategy.sharding is not None:
        graph, layout = shard_states(graph, layout, strategy.sharding, batch)
    graph, layout = gather_outputs(graph, layout)
    settings = settings_for(graph, layout, batch, workers)
    return make_plan(graph, layout, settings, one_stage, optimizer, pool=pool)
