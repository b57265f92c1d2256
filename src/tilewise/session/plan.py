"""`Plan`: a plan together with the inputs from which it was made, so that it can be saved.

A plan's file has the inputs and the plan's digest, and no instructions. Loading it plans again and
compares the digests. So a file, also one of an untrusted author, cannot make the runtime execute
anything that planning would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from tilewise.core.errors import PlanError, TilewiseError
from tilewise.core.limits import memory_of_machine
from tilewise.core.progress import Progress
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import Validator, shown
from tilewise.files.reading import Unreadable
from tilewise.files.writing import replace_file
from tilewise.graph.file import Definition, require_definition
from tilewise.ir.digest import digest_computation
from tilewise.ir.file import Unwritable
from tilewise.ir.hints import Hint, Replicate, Shard
from tilewise.ir.policy import ExecutionPolicy, TaskExecutionHints
from tilewise.optim import Optimizer
from tilewise.plan import PlanSettings, PlanTables
from tilewise.plan.file import decode_plan, encode_plan, read_content
from tilewise.processes.workers import WorkerPool
from tilewise.session.context import ExecutionContext
from tilewise.session.planning import PlanRequest, plan_graph, request_for
from tilewise.strategy import (
    DistributionStrategy,
    NothingToOffload,
    ParallelismMode,
    PipelineStages,
    StateSharding,
)

__all__ = ["Plan", "PlanInputs", "plan_inputs", "plan_within_memory"]

_MAX_MICROBATCHES = 1 << 16  # of a file; planning takes time for each
_validate = Validator("plan", PlanError)


class PlanInputs(NamedTuple):
    """What a plan is made from.

    Attributes:
        definition: the graph as its author defined it, and the loss.
        optimizer: the optimizer whose update is in the plan, if any.
        request: the settings.
        decisions: what a policy left open and planning decided, in words.
    """

    definition: Definition
    optimizer: Optimizer | None
    request: PlanRequest
    decisions: tuple[str, ...] = ()


class SavedPlan(NamedTuple):
    """The content of a plan's file.

    Attributes:
        definition, optimizer: as in `PlanInputs`.
        settings: the request as plain data.
        digest: of the plan.
    """

    definition: Definition
    optimizer: object
    settings: Mapping[str, Any]
    digest: str


@dataclass(frozen=True)
class Plan(PlanTables):
    """A graph laid out on a mesh, divided into tiles, placed in memory and ordered.

    `ComputeGraph.plan` makes it. It is frozen; `print(plan.explain())` describes it.
    """

    inputs: PlanInputs | None = field(default=None, compare=False, repr=False)

    def explain(self) -> str:
        """Mesh, policy, memory, tiles, tasks, traffic and templates as text, before anything runs."""
        decisions = () if self.inputs is None else self.inputs.decisions
        return "\n".join([super().explain(), *(f"  decided: {text}" for text in decisions)])

    def context(self) -> ExecutionContext:
        """What the plan answers about single tiles: devices, workers and hints."""
        return ExecutionContext(self)

    @classmethod
    def of(cls, plan: PlanTables, inputs: PlanInputs) -> Plan:
        """A plan with its inputs."""
        tables = {f.name: getattr(plan, f.name) for f in fields(PlanTables)}
        return cls(**tables, inputs=inputs)

    def save(self, path: str | Path) -> None:
        """Write what the plan was made from and its digest, completely or not at all. Equal plans
        give equal files; weights are not included.

        Raises:
            PlanError: the path is invalid, the plan was not made by `ComputeGraph.plan`, or a value
                cannot be stored: an attribute of an op that is not plain data, or an optimizer whose
                name another class has taken.
            ResourceError: it cannot be written; an existing file is kept.
        """
        where = _validate.path("save", "path", path)
        if self.inputs is None:
            _validate.invalid(
                "save", "a plan must have its inputs", "one that was changed", "plan the graph again"
            )
        definition, optimizer, request, _ = self.inputs
        try:
            settings = _as_data(request, self.settings)
            require_definition(definition)
            content = encode_plan(SavedPlan(definition, optimizer, settings, self.digest()))
        except (Unreadable, Unwritable) as error:
            _validate.invalid("save", str(error), f"the plan of {self.graph.name!r}", "use plain data")
        replace_file(where, lambda temporary: _write(temporary, content))

    @classmethod
    def load(cls, path: str | Path, pool: WorkerPool | None = None) -> Plan:
        """Read a file that `save` wrote, in this or another process, and plan again. The plan runs
        with the same bits.

        The file is not trusted: the graph is checked as `ComputeGraph.load` does, the settings as
        `ComputeGraph.plan` does. Custom ops and optimizers are looked up by name among those that
        this process has defined; a file imports nothing.

        Args:
            path: the file.
            pool: as in `ComputeGraph.plan`.

        Raises:
            PlanError: it is not a plan, is damaged or written by another version, names an op or
                optimizer that is not defined here, or planning here gives another plan.
        """
        where = _validate.path("load", "path", path)
        try:
            saved = decode_plan(read_content(where), SavedPlan)
            inputs = _inputs_of(saved)
            made = cls.of(plan_inputs(inputs, pool), inputs)
            if made.digest() != saved.digest:
                raise Unreadable("planning its graph gives another plan: this version plans otherwise")
        except Unreadable as error:
            reason = str(error)
        except TilewiseError as error:
            reason = f"it breaks a rule: {str(error).rpartition(';')[0] or error}"
        else:
            return made
        _validate.invalid(
            "load", "a plan file must be one that Plan.save wrote", f"{str(where)!r}: {reason}", "plan again"
        )


def _inputs_of(saved: SavedPlan) -> PlanInputs:
    require_definition(saved.definition)
    optimizer = saved.optimizer
    if optimizer is not None and (not isinstance(optimizer, Optimizer) or saved.definition.loss is None):
        raise Unreadable(f"its optimizer must be one of a graph with a loss; got {shown(optimizer)}")
    request = _from_data(saved.settings)
    if request.accumulation is not None and request.accumulation > _MAX_MICROBATCHES:
        raise Unreadable(f"it has more than {_MAX_MICROBATCHES} microbatches")
    return PlanInputs(saved.definition, optimizer, request)


def plan_inputs(
    inputs: PlanInputs, pool: WorkerPool | None = None, progress: Progress | None = None
) -> PlanTables:
    """Plan what a graph's author defined.

    Raises:
        LayoutError, PlanError, ShapeError: as `ComputeGraph.plan`.
    """
    (graph, loss), optimizer, request, _ = inputs
    return plan_graph(graph, loss, optimizer, request, digest_computation(graph, loss), pool, progress)


def plan_within_memory(
    inputs: PlanInputs, pool: WorkerPool | None = None, progress: Progress | None = None
) -> tuple[PlanTables, PlanInputs]:
    """Plan, and with a policy that enables offloading, offload until a device needs at most the
    threshold. Return the plan and the inputs with which planning again gives the same plan.

    Raises:
        LayoutError, PlanError, ShapeError: as `ComputeGraph.plan`.
    """
    made, request = plan_inputs(inputs, pool, progress), inputs.request
    requested, decided = request.options.policy, made.settings.policy
    decisions = []
    if requested.placement != decided.placement:
        decisions.append(f"placement {requested.placement} became {decided.placement}")
    if not requested.enable_offloading:
        return made, inputs._replace(decisions=tuple(decisions))
    memory = requested.device_memory_bytes or memory_of_machine() // made.mesh.num_devices
    for kind in _OFFLOADED_FIRST:
        need = max(usage["total"] for usage in made.estimate_memory_usage())
        if need <= requested.offload_threshold * memory:
            break
        if kind in request.options.offloaded:
            continue
        options = replace(request.options, offloaded=request.options.offloaded | {kind})
        more = replace(request, options=options)
        limit = f"{requested.offload_threshold:.0%} of {format_bytes(memory)}"
        try:
            made = plan_inputs(inputs._replace(request=more), pool, progress)
        except NothingToOffload:
            continue
        request = more
        decisions.append(
            f"offloaded {kind}: without it a device needs {format_bytes(need)}, more than {limit}"
        )
    return made, inputs._replace(request=request, decisions=tuple(decisions))


_OFFLOADED_FIRST = ("optimizer", "parameters", "activations")
"""What a policy offloads, in this order: the states of an optimizer are read once per step."""


def _as_data(request: PlanRequest, settings: PlanSettings) -> dict[str, Any]:
    """A request as plain data: the strategy, and the arguments of `request_for`. What this machine
    decided (the workers, the batch splits, the policy's placement, what is offloaded) is stated.
    """
    strategy, options = request.strategy, request.options
    sharding, stages = strategy.sharding, strategy.stages
    layouts = {name: _hint_as_data(hint) for name, hint in strategy.layouts.items()}
    mesh = None if request.mesh == strategy.mesh() else dict(zip(request.mesh.names, request.mesh.sizes))
    return {
        "mode": strategy.mode.value,
        "axes": dict(strategy.axes),
        "rules": dict(strategy.rules),
        "layouts": layouts,
        "sharding": None if sharding is None else asdict(sharding),
        "stages": None if stages is None else asdict(stages),
        "mesh": mesh,
        "accumulation": request.accumulation,
        "batch_splits": settings.batch_splits if settings.batch else None,
        "recompute": request.recomputation.as_argument(),
        "offload": tuple(sorted(options.offloaded)),
        "workers_per_device": settings.workers_per_device,
        "rows_per_tile": options.rows_per_tile,
        "sizes": dict(request.sizes),
        "strict": options.strict,
        "checkpoints": options.is_checkpointed,
        "policy": asdict(settings.policy),
    }


def _policy_of(data: Mapping[str, Any]) -> ExecutionPolicy:
    hints = {pattern: TaskExecutionHints(**own) for pattern, own in data["hints"].items()}
    return ExecutionPolicy(**{**data, "hints": hints})


def _from_data(data: Mapping[str, Any]) -> PlanRequest:
    """The request that `_as_data` described; its values are checked as a user's are."""
    arguments = dict(data)
    for name, kinds in _KINDS.items():
        if not isinstance(arguments.get(name), kinds):
            raise Unreadable(
                f"its settings are not those of a plan: {name!r} is {shown(arguments.get(name))}"
            )
    try:
        strategy = DistributionStrategy(
            ParallelismMode(arguments.pop("mode")),
            arguments.pop("axes"),
            arguments.pop("rules"),
            {name: _hint_of(hint) for name, hint in arguments.pop("layouts").items()},
            None if (sharding := arguments.pop("sharding")) is None else StateSharding(**sharding),
            None if (stages := arguments.pop("stages")) is None else PipelineStages(**stages),
        )
        arguments["policy"] = _policy_of(arguments["policy"])
        return request_for(strategy, arguments.pop("mesh"), **arguments)
    except TilewiseError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"its settings are not those of a plan: {shown(error)}") from None


_KINDS: Mapping[str, tuple[type, ...]] = {
    "mode": (str,),
    "axes": (Mapping,),
    "rules": (Mapping,),
    "layouts": (Mapping,),
    "sharding": (Mapping, NoneType),
    "stages": (Mapping, NoneType),
    "mesh": (Mapping, NoneType),
    "accumulation": (int, NoneType),
    "batch_splits": (int, NoneType),
    "recompute": (str, tuple),
    "offload": (tuple,),
    "workers_per_device": (int, NoneType),
    "rows_per_tile": (int, NoneType),
    "sizes": (Mapping,),
    "strict": (bool,),
    "checkpoints": (bool,),
    "policy": (Mapping,),
}
"""The types of the settings in a file; planning checks their values."""


def _hint_as_data(hint: Hint) -> object:
    if not isinstance(hint, Mapping):
        return tuple(hint)
    return {axis: placed.dim if isinstance(placed, Shard) else None for axis, placed in hint.items()}


def _hint_of(data: Any) -> Hint:
    if not isinstance(data, Mapping):
        return tuple(data)
    return {axis: Replicate() if dim is None else Shard(dim) for axis, dim in data.items()}


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
