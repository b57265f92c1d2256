"""Planning in one screen: from a user's graph to a plan, a stage per line.

    complete_graph    simplify -> differentiate -> recompute -> update  session.passes, graph, optim
    solve_layouts     the layout of every tensor                        strategy
    run_passes        reshards, storage, files                          session.passes, strategy
    make_plan         schedule -> lower -> place -> bind -> prove       plan.make

Each stage is a function from frozen values to a frozen value; no value goes back to an earlier one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewise.core.collector import collector_paused
from tilewise.core.dims import BATCH
from tilewise.core.errors import PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.core.progress import Progress
from tilewise.core.validation import Validator
from tilewise.graph import Differentiated, Recomputation, fix_sizes, fuse_into_table_gradients
from tilewise.ir.batch import cut_batch
from tilewise.ir.graph import Graph
from tilewise.ir.policy import ExecutionPolicy
from tilewise.ir.validate import validate_graph
from tilewise.optim import Optimizer
from tilewise.plan import PlanTables, check_sizes, make_plan, symbols_of
from tilewise.processes.workers import WorkerPool
from tilewise.runtime import device_overhead
from tilewise.session.inputs import check_constants
from tilewise.session.passes import GRAPH_PASSES, PASSES, GraphOptions, LaidOut, PassOptions, run_passes
from tilewise.strategy import (
    DistributionStrategy,
    check_offload,
    microbatches_for,
    propagate_layouts,
)

__all__ = ["PlanRequest", "complete_graph", "lay_out", "plan_graph", "request_for", "solve_layouts"]

_validate = Validator("session", PlanError)


@dataclass(frozen=True)
class PlanRequest:
    """The settings of `ComputeGraph.plan`, checked.

    Attributes:
        mesh: the devices.
        strategy: what their axes share.
        accumulation: microbatches per step; None: chosen for a pipeline.
        batch_splits: parts of the batch that are summed separately; None: chosen.
        recomputation: what the backward pass computes again.
        sizes: values of symbolic sizes by name.
        options: the settings of passes.
    """

    mesh: DeviceMesh
    strategy: DistributionStrategy
    accumulation: int | None = 1
    batch_splits: int | None = None
    recomputation: Recomputation = field(default_factory=lambda: Recomputation.of("none"))
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: PassOptions = field(default_factory=PassOptions)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are calls of their own."""
        return self.options.stages is not None and self.options.stages.splits_backward


def request_for(
    strategy: DistributionStrategy,
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    *,
    accumulation: int | None = None,
    batch_splits: int | None = None,
    recompute: str | Sequence[str] = "none",
    offload: str | Collection[str] = "none",
    workers_per_device: int | None = None,
    rows_per_tile: int | None = None,
    sizes: Mapping[str, int] | None = None,
    strict: bool = False,
    checkpoints: bool = False,
    policy: ExecutionPolicy | None = None,
) -> PlanRequest:
    """Check the arguments of `ComputeGraph.plan` that need no graph.

    Raises:
        LayoutError, PlanError: an argument is invalid, or the mesh lacks an axis of the strategy.
    """
    offloaded = check_offload(offload)
    device_mesh = DeviceMesh(mesh) if isinstance(mesh, Mapping) else mesh
    if device_mesh is not None and not strategy.axes:
        strategy = DistributionStrategy.for_mesh(device_mesh)
    used = device_mesh if device_mesh is not None else strategy.mesh()
    if strategy.sharding is not None and not {*strategy.sharding.axes} <= {*used.names}:
        _validate.invalid(
            "plan",
            f"a mesh must have the axes that shard the strategy's state ({', '.join(strategy.sharding.axes)})",
            f"{used}",
            "plan without a mesh, name them, or choose another strategy",
        )
    stages = strategy.stages if strategy.stages is not None and used.size(strategy.stages.axis) > 1 else None
    policy = _checked_policy(policy)
    sharding = strategy.sharding
    if sharding is not None and not policy.prefetch:
        sharding = replace(sharding, prefetch=0)
    options = PassOptions(
        strict, sharding, offloaded, workers_per_device, checkpoints, rows_per_tile, stages, policy
    )
    if accumulation is None and strategy.stages is None:
        accumulation = 1
    recomputation = Recomputation.of(recompute)
    sizes = {} if sizes is None else sizes
    return PlanRequest(used, strategy, accumulation, batch_splits, recomputation, sizes, options)


def _checked_policy(policy: object) -> ExecutionPolicy:
    if policy is None:
        return ExecutionPolicy()
    return _validate.instance(
        "plan", "policy", policy, ExecutionPolicy, 'pass tw.ExecutionPolicy(placement="affinity")'
    )


def plan_graph(
    graph: Graph,
    loss: int | None,
    optimizer: Optimizer | None,
    request: PlanRequest,
    definition: str,
    pool: WorkerPool | None = None,
    progress: Progress | None = None,
) -> PlanTables:
    """Plan a user's graph.

    Args:
        loss: the tensor to differentiate; None: the graph has no loss.
        definition: the digest of the graph as its author defined it.
        pool, progress: as in `ComputeGraph.plan`.

    Raises:
        LayoutError, PlanError, ShapeError: as `ComputeGraph.plan`.
    """
    shown = Progress() if progress is None else progress
    with collector_paused():
        with shown.phase("gradients"):
            options = GraphOptions(loss, optimizer, request.recomputation, pool, request.splits_backward)
            complete = complete_graph(graph, options)
        with shown.phase("layouts"):
            laid_out = run_passes(solve_layouts(complete, request), request.options, PASSES)
            settings = request.options.settings(laid_out)
        with shown.phase("plan"):
            return make_plan(
                laid_out.graph,
                laid_out.layout,
                settings,
                request.options.schedules(laid_out),
                optimizer,
                device_overhead,
                pool,
                definition,
            )


def complete_graph(graph: Graph, options: GraphOptions) -> Graph:
    """The graph with its backward pass and update, after simplification.

    Raises:
        PlanError: `recomputation` matches nothing, or a rule of graphs is violated.
    """
    made = run_passes(Differentiated(graph, {}, {}), options, GRAPH_PASSES)
    # differentiation and recomputation validate templates with a gradient, and the gradients
    templates = made.graph.templates
    forward = (templates[made.graph.ops[call].attrs["template"]] for call in made.layers)
    backward = (gradient.template for _, gradient in made.layers.values())
    validate_graph(made.graph, {id(template.graph) for template in (*forward, *backward)})
    return made.graph


def solve_layouts(graph: Graph, request: PlanRequest) -> LaidOut:
    """Divide the batch and give every tensor its layout.

    Raises:
        LayoutError, PlanError: the strategy does not fit the graph, or the batch does not divide.
        ShapeError: a constant used as an index is out of range.
    """
    check_constants(graph)
    sizes = check_sizes("plan", symbols_of(graph), request.sizes)
    microbatches = request.accumulation
    if microbatches is None:
        microbatches = _microbatches_of_pipeline(graph, request)
    batch = cut_batch(graph, microbatches, request.batch_splits)
    if batch.microbatches == 1:
        graph = fuse_into_table_gradients(graph)
    if sizes:
        graph = fix_sizes(graph, sizes)
        batch = replace(cut_batch(graph, microbatches, request.batch_splits), bound=batch.bound)
    layout = propagate_layouts(graph, request.mesh, request.strategy, batch)
    return LaidOut(graph, layout, batch)


def lay_out(graph: Graph, request: PlanRequest) -> LaidOut:
    """A user's graph as it is, with its layouts on a mesh and with changes of layout as ops.

    Raises:
        LayoutError, PlanError, ShapeError: as `solve_layouts`.
    """
    return run_passes(solve_layouts(graph, request), request.options, PASSES[:1])


def _microbatches_of_pipeline(graph: Graph, request: PlanRequest) -> int:
    """The strategy's microbatches, which are for training; otherwise as many as there are stages, or the
    next number that the batch splits allow.
    """
    own, stages = request.strategy.stages, request.options.stages
    is_trained = any(op.phase == "backward" for op in graph.ops)
    if own is not None and own.microbatches is not None and is_trained:
        return own.microbatches
    batch = cut_batch(graph, 1, request.batch_splits)
    if stages is None or not batch.size:
        return 1
    sharing = request.mesh.size(*request.strategy.axes_for(BATCH.name))
    return microbatches_for(stages.schedule, request.mesh.size(stages.axis), batch.batch_splits, sharing)
