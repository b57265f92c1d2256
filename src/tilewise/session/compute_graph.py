"""`ComputeGraph`: a graph that can be laid out, planned and instantiated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.core.collector import collector_paused
from tilewise.core.errors import PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.core.progress import Progress
from tilewise.core.validation import Validator
from tilewise.files.reading import Unreadable
from tilewise.files.writing import replace_file
from tilewise.graph import Adapter, GraphBuilder, Recomputation
from tilewise.graph.draft import GraphDraft
from tilewise.graph.file import (
    Definition,
    decode_definition,
    encode_definition,
    read_content,
    require_definition,
)
from tilewise.ir.digest import digest_graph
from tilewise.ir.file import Unwritable
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.mermaid import to_mermaid
from tilewise.ir.policy import ExecutionPolicy
from tilewise.ir.show import show_graph
from tilewise.optim import Optimizer
from tilewise.plan import PlanTables
from tilewise.processes.workers import WorkerPool
from tilewise.session.instance import GraphInstance
from tilewise.session.own_plan import require_own
from tilewise.session.passes import GraphOptions
from tilewise.session.plan import Plan, PlanInputs, plan_within_memory
from tilewise.session.planning import complete_graph, lay_out, request_for
from tilewise.strategy import DistributionStrategy

__all__ = ["ComputeGraph"]

_validate = Validator("session", PlanError)


class ComputeGraph(GraphBuilder):
    """A model as a graph, which can be planned and run.

    Examples:
        >>> graph = ComputeGraph("twice")
        >>> x = graph.input([4, 8], "f32", name="x")
        >>> _ = graph.output(graph.scale(x, 2.0), "y")
        >>> [program for program in graph.plan({"dp": 1}).programs]
        ['forward']
    """

    def __init__(
        self,
        name: str = "graph",
        *,
        k_splits: int | None = None,
        formats: Mapping[str, str] | None = None,
        quantized_matmul: str = "exact",
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        super().__init__(
            name, k_splits=k_splits, formats=formats, quantized_matmul=quantized_matmul, adapters=adapters
        )
        self._strategy = DistributionStrategy.single()
        self._optimizer: Optimizer | None = None
        self._policy = ExecutionPolicy()

    @property
    def distribution(self) -> DistributionStrategy:
        """The strategy of the graph; `set_distribution` changes it."""
        return self._strategy

    def set_distribution(self, strategy: DistributionStrategy) -> None:
        """Set the strategy of the graph.

        Raises:
            PlanError: it is not a strategy.
        """
        self._strategy = _validate.instance(
            "set_distribution",
            "a strategy",
            strategy,
            DistributionStrategy,
            "pass DistributionStrategy.ddp(2)",
        )

    @property
    def execution_policy(self) -> ExecutionPolicy:
        """The execution policy of the graph; `set_execution_policy` changes it."""
        return self._policy

    def set_execution_policy(self, policy: ExecutionPolicy) -> None:
        """Choose which workers run which tasks, and how. It changes no bit of a result.

        Raises:
            PlanError: it is not a policy.
        """
        self._policy = _validate.instance(
            "set_execution_policy",
            "a policy",
            policy,
            ExecutionPolicy,
            'pass tw.ExecutionPolicy(placement="affinity")',
        )

    def optimize(self, optimizer: Optimizer) -> None:
        """Make the update of all parameters part of the graph.

        Raises:
            PlanError: the graph has no loss.
        """
        _validate.instance(
            "optimize",
            "an optimizer",
            optimizer,
            Optimizer,  # type: ignore[type-abstract]
            "pass optim.AdamW()",
        )
        if self.draft.loss_id is None:
            raise PlanError(
                f"[session.optimize] the graph needs a loss first; got none in {self.name!r}; call graph.loss"
            )
        self._optimizer = optimizer

    def topological_order(self) -> list[OpNode]:
        """The ops, producers before consumers."""
        return list(self.draft.ops)

    def complete(self, *, recompute: str | Sequence[str] = "none", pool: WorkerPool | None = None) -> Graph:
        """The graph with its backward pass and update, after all passes.

        Args:
            recompute: as in `plan`.
            pool: as in `plan`.

        Raises:
            PlanError: as `plan`, of `recompute`.
        """
        options = GraphOptions(self.draft.loss_id, self._optimizer, Recomputation.of(recompute), pool)
        with collector_paused():
            return complete_graph(self.freeze(), options)

    def plan(
        self,
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
        pool: WorkerPool | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """Decide tiles, placement, order, memory and communication. Nothing runs.

        Args:
            mesh: the devices; by default those of the strategy (`set_distribution`). Without a strategy, the names of
                the mesh's axes (`pp`, `dp`, `fsdp`, `tp`) determine what they share.
            accumulation: microbatches per step; by default 1, or what the strategy's pipeline states.
            batch_splits: number of parts of the batch that are summed separately; by default the largest power of two
                up to 16 that divides the batch. It determines bits of the result, so keep it when devices change. n
                blocks (devices that share the batch x microbatches) are possible if n is 1 or batch_splits / n is a
                power of two: 12 batch splits for 3 devices.
            recompute: what the backward pass computes again instead of reading saved results: `none`; `full`,
                everything but the layers' arguments; `selective`, everything but results of products and of attention;
                or a list of patterns of layers (`layers.[0-3]`) or of ops in them (`layers.*/silu_gate`), by their
                labels in `print(graph)` or their names. It trades time for memory and changes no bit.
            offload: what is stored in a file of each device and fetched when it is needed: `optimizer`, the
                optimizer's states; `parameters`, weights; `activations`, results that the backward pass reads; or
                several of them. It trades time for memory and changes no bit.
            workers_per_device: threads per device; by default the cores that this process may use / devices.
            rows_per_tile: the maximum number of rows of activations in a tile, which one task processes; by default
                512. A tile consists of whole sequences of one batch split, at least one. It changes no bit.
            sizes: values of symbolic sizes by name, such as `{"seq": 40}`. The plan is then only for these sizes, with
                the memory that they need. No result changes.
            strict: reject changes of layout between ops that no hint asks for. Hints also cover the changes that they
                cause in the backward pass. Gathering outputs for the host is always allowed, and so is gathering ids
                and rows for gradients of tables, where it reads less than the alternative.
            checkpoints: also count the copy of parameters and optimizer states that is in memory while a checkpoint
                is written during training.
            policy: which workers run which tasks; by default that of `set_execution_policy`. It changes no bit.
            pool: worker processes that differentiate and lower templates, if at least 16 differ; the plan is the same.
            progress: receives the phases gradients, layouts and plan.

        Raises:
            LayoutError, PlanError: the strategy does not fit the graph, the batch does not divide, or `recompute`,
                `offload` or a pattern of the policy is unknown or matches nothing.
            ShapeError: a constant used as an index is out of range.
        """
        request = request_for(
            self._strategy,
            mesh,
            accumulation=accumulation,
            batch_splits=batch_splits,
            recompute=recompute,
            offload=offload,
            workers_per_device=workers_per_device,
            rows_per_tile=rows_per_tile,
            sizes=sizes,
            strict=strict,
            checkpoints=checkpoints,
            policy=self._policy if policy is None else policy,
        )
        if pool is not None:
            _validate.instance("plan", "a pool", pool, WorkerPool, "pass tw.WorkerPool(2)")
        inputs = PlanInputs(Definition(self.freeze(), self.draft.loss_id), self._optimizer, request)
        return Plan.of(*plan_within_memory(inputs, pool, progress))

    def estimate_memory_usage(
        self, mesh: DeviceMesh | Mapping[str, int] | None = None, **options: Any
    ) -> list[dict[str, int]]:
        """Bytes per device and category, equal to what `instantiate` allocates."""
        return self.plan(mesh, **options).estimate_memory_usage()

    def instantiate(
        self,
        plan: PlanTables | None = None,
        *,
        memory_limit_bytes: int = 0,
        deadline_s: float = 60.0,
        offload_directory: str | Path | None = None,
    ) -> GraphInstance:
        """Allocate a plan's devices and make its programs runnable; the same as
        `GraphInstance(plan)`.

        Args:
            plan: by default `self.plan()`.
            memory_limit_bytes: over all devices; 0 for the machine's own limit.
            deadline_s: longest time without progress before a run is aborted.
            offload_directory: directory of the devices' files; by default that of temporary files.

        Raises:
            ResourceError: not enough memory.
            PlanError: it is not a plan, it is the plan of another graph (other inputs, parameters,
                states, constants, ops, outputs, loss, k splits, symbols or optimizer), or a limit
                or deadline is invalid.
        """
        if plan is None:
            plan = self.plan()
        elif isinstance(plan, PlanTables):
            require_own(self, self._optimizer, plan)
        return GraphInstance(
            plan,
            memory_limit_bytes=memory_limit_bytes,
            deadline_s=deadline_s,
            offload_directory=offload_directory,
        )

    # ---- files ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the definition of the graph as JSON, completely or not at all. Equal graphs give
        equal files.

        The file has tensors, ops, layers, outputs, hints, constants and the loss, which are what
        `digest` covers. Strategy, optimizer and parameter values are not included.

        Raises:
            PlanError: the path is invalid, or a value cannot be stored: an attribute of an op that
                is not plain data, or something that is not part of a definition, such as a backward
                pass.
            ResourceError: it cannot be written; an existing file is kept.
        """
        where = _validate.path("save", "path", path)
        definition = Definition(self.freeze(), self.draft.loss_id)
        try:
            require_definition(definition)
            content = encode_definition(definition)
        except (Unreadable, Unwritable) as error:
            _validate.invalid(
                "save",
                "a graph file must contain only plain data",
                f"{self.name!r}: {error}",
                "correct it",
            )
        replace_file(where, lambda temporary: _write(temporary, content))

    @classmethod
    def load(cls, path: str | Path) -> ComputeGraph:
        """Read a graph that `save` wrote. It has the same digest and plans, and runs with the same
        bits.

        The file is not trusted: the types of all fields are checked, tensors are declared and
        results are inferred again, and differences are an error. Custom ops are looked up by name
        among those that this process has defined; a file imports nothing. Layers are loaded as they
        were traced; calling a layer's function on a loaded graph traces it again.

        Raises:
            PlanError: it is not a graph file, is damaged or written by another version, or names an
                op that is not defined here.
        """
        where = _validate.path("load", "path", path)
        try:
            definition, digest = decode_definition(read_content(where))
            require_definition(definition)
            if definition.digest() != digest:
                raise Unreadable("it is damaged or was changed: its digest differs")
        except Unreadable as error:
            _validate.invalid(
                "load",
                "a graph file must be one that ComputeGraph.save wrote",
                f"{str(where)!r}: {error}",
                "save the graph again",
            )
        graph = cls(definition.graph.name, k_splits=definition.graph.k_splits)
        graph.draft = GraphDraft.of(definition.graph)
        graph.draft.loss_id = definition.loss
        graph.draft.share_ops()
        return graph

    def digest(self) -> str:
        """SHA-256 of the definition of the graph: structure, shapes, names, hints, constants, loss,
        k splits.

        Equal graphs have equal digests, in any process. Strategy and optimizer are not part of it.
        An op's attribute that is not plain data counts as its `str`.
        """
        return digest_graph(self.freeze(), self.draft.loss_id)

    def to_mermaid(self, mesh: DeviceMesh | Mapping[str, int] | None = None) -> str:
        """The graph as a Mermaid flow chart: layers are subgraphs, repeated calls are one box.

        With a mesh or a strategy, boxes show the layouts of tensors and results: which mesh axes
        shard each dim, such as `(dp, -, tp)`. Changes of layout, which `plan` inserts, are boxes
        with the layouts before and after. In `dp*micro`, microbatches divide the dim in time.

        Args:
            mesh: as for `plan`.

        Raises:
            LayoutError, PlanError: the strategy does not fit the graph.

        Examples:
            >>> from tilewise import BATCH
            >>> graph = ComputeGraph("twice")
            >>> x = graph.input([4, 8], name="x", labels=[BATCH, None])
            >>> _ = graph.output(graph.scale(x, 2.0), "y")
            >>> print(graph.to_mermaid({"dp": 2}))
            flowchart TD
              t0("x: f32[4, 8] (dp, -)")
              o0["scale: (dp, -)"]
              t0 --> o0
              o0 --> out0(["y"])
        """
        graph = self.freeze()
        if mesh is None and not self._strategy.axes:
            return to_mermaid(graph)
        laid_out = lay_out(graph, request_for(self._strategy, mesh))
        return to_mermaid(laid_out.graph, laid_out.layout)

    def __str__(self) -> str:
        return show_graph(self.freeze())


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
