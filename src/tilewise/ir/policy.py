"""How tasks are executed: hints for single tasks, and the execution policy of a graph.

A policy chooses workers, priorities and the moment of transfers. It never changes which tasks there
are, or the order in which partial values are added, so it changes no bit of a result.
`plan.policy` applies a policy to a tile program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.errors import PlanError
from tilewise.core.frozen import freeze_maps
from tilewise.core.validation import Validator, shown

__all__ = ["DEFAULT_POLICY", "MAX_PRIORITY", "PLACEMENTS", "ExecutionPolicy", "TaskExecutionHints"]

PLACEMENTS = ("auto", "owner_computes", "affinity", "explicit")
MAX_PRIORITY = 1 << 20  # of a policy; the planner's own priorities are below 10
_MAX_INT = (1 << 31) - 1
_MAX_WORKER = 254  # a device has at most 255 workers
_MAX_CORE = (1 << 16) - 1
_MAX_BYTES = 1 << 62
_of_task = Validator("runtime")
_validate = Validator("ir", PlanError)


@dataclass(frozen=True)
class TaskExecutionHints:
    """Hints for the scheduler. A hint that cannot be satisfied is an error, never silently ignored.

    Attributes:
        target_node: the device. A runtime is one device, so the only values are None and 0. In a
            policy, None: strategies place layers on devices.
        target_worker: the worker that must run the task; None for any worker of the right type.
        priority: ready tasks with a higher priority run first. 0 is the fastest to schedule, and in
            a policy means that the entry states no priority.
        prefetch_inputs: move the inputs to the device before the task runs. Workers read all memory
            of this device in place, so this has no effect.
        prefetch_handles: further buffers to move, which must be valid. This has no effect either.
    """

    target_node: int | None = None
    target_worker: int | None = None
    priority: int = 0
    prefetch_inputs: bool = False
    prefetch_handles: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if (
            self.target_node is not None
            and _of_task.integer("hints", "target_node", self.target_node, 0, _MAX_INT) != 0
        ):
            _of_task.invalid(
                "hints",
                "target_node must be this runtime's device",
                str(self.target_node),
                "a runtime is device 0: submit to the other device's runtime; a graph's layers are placed on "
                "devices by DistributionStrategy.pipeline(layers_per_stage=...)",
            )
        if self.target_worker is not None:
            _of_task.integer("hints", "target_worker", self.target_worker, 0, _MAX_INT - 1)
        _of_task.integer("hints", "priority", self.priority, -_MAX_INT - 1, _MAX_INT)


@dataclass(frozen=True)
class ExecutionPolicy:
    """Which workers of a device run which tasks, and how. It changes no bit of a result.

    Patterns are those of `fnmatch`. They match an op by its label, a layer by its label (with its
    backward pass), or a layer's template by the name of its function; an entry for an op stands
    before one for a layer, and this before one for a template. Among entries of one kind, a name
    without wildcards stands before a pattern, and the pattern with more plain characters before the
    other.

    Args:
        placement: `owner_computes`, any worker of the device that stores the result; `affinity`,
            task i of n of an instruction prefers worker i * workers / n, so that it finds the tiles
            of the last run in that worker's cache; `explicit`, the entries of `workers` and
            `hints`; `auto`, affinity if a device's parameters fit the private caches of its
            workers, otherwise owner_computes. Entries are pins with every placement.
        preferred_workers: the workers that tasks without a pin prefer; by default all. Another
            worker takes such a task only after it has been idle for some microseconds.
        workers: per pattern, the worker that must run its tasks, or several: task i of n of an
            instruction then runs on workers[i * len(workers) // n].
        hints: per pattern, a target worker, a priority, or both.
        base_priority: the priority of tasks that neither the planner nor an entry gives one. The
            planner gives exchanges between devices 2.
        prefetch: gather or fetch weights before the layer that reads them. Without it they are
            gathered just before, which takes less memory.
        bind_to_cores: bind each worker to a core of its own.
        cores: the cores, per worker, first those of device 0; by default those that the process may
            use, in order. Implies `bind_to_cores`.
        numa_node: bind workers to cores of this NUMA node. Implies `bind_to_cores`.
        enable_offloading: offload what is needed for a device to stay below the threshold: first
            states of the optimizer, then parameters, then activations.
        offload_threshold: the share of a device's memory that it may use, 0 to 1.
        device_memory_bytes: a device's memory; 0: the machine's, divided by the devices.
        enable_commute: must be False. Tasks that add to one result in any order would make its bits
            depend on chance.

    Raises:
        PlanError: a value is invalid.

    Examples:
        >>> policy = ExecutionPolicy("explicit", workers={"layers.[0-3]": 0, "layers.[4-7]": 1})
        >>> policy.workers["layers.[0-3]"]
        (0,)
    """

    placement: str = "owner_computes"
    preferred_workers: tuple[int, ...] = ()
    workers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    hints: Mapping[str, TaskExecutionHints] = field(default_factory=dict)
    base_priority: int = 0
    prefetch: bool = True
    bind_to_cores: bool = False
    cores: tuple[int, ...] = ()
    numa_node: int | None = None
    enable_offloading: bool = False
    offload_threshold: float = 0.8
    device_memory_bytes: int = 0
    enable_commute: bool = False

    def __post_init__(self) -> None:
        _validate.choice("policy", "placement", self.placement, PLACEMENTS)
        self._set("preferred_workers", _workers("preferred_workers", self.preferred_workers, least=0))
        workers = _validate.mapping("policy", "workers", self.workers, "workers").items()
        self._set("workers", {_pattern(p): _workers(f"workers[{p!r}]", value) for p, value in workers})
        hints = _validate.mapping("policy", "hints", self.hints, "TaskExecutionHints")
        self._set("hints", {_pattern(p): _entry(p, value) for p, value in hints.items()})
        freeze_maps(self, "workers", "hints")
        self._require_one_choice()
        _validate.integer("policy", "base_priority", self.base_priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("prefetch", "bind_to_cores", "enable_offloading", "enable_commute"):
            self._set(name, _validate.truth("policy", name, getattr(self, name)))
        self._check_cores()
        share = _validate.number("policy", "offload_threshold", self.offload_threshold, 0.0, 1.0)
        self._set("offload_threshold", share)
        _validate.integer("policy", "device_memory_bytes", self.device_memory_bytes, 0, _MAX_BYTES)
        if self.enable_commute:
            _validate.invalid(
                "policy",
                "enable_commute must be False, because sums in floating point depend on the order of addition, and "
                "results must have the same bits in every run and on every mesh",
                "True",
                "leave it out; partial sums are added along a fixed tree, which needs no order of the tasks",
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _require_one_choice(self) -> None:
        """An explicit placement needs a worker; two entries for one pattern must not differ."""
        pinned = {p for p, own in self.hints.items() if own.target_worker is not None}
        both = sorted(pinned & {*self.workers})
        if both:
            _validate.invalid(
                "policy",
                "a pattern's workers must be given once",
                f"{both[0]!r} in workers and in hints",
                "drop target_worker from the hints",
            )
        if self.placement == "explicit" and not self.workers and not pinned:
            _validate.invalid(
                "policy",
                "placement 'explicit' needs workers of layers, templates or ops",
                "none",
                'pass workers={"layers.0": 0}; DistributionStrategy.pipeline(layers_per_stage=...) places layers on '
                "devices",
            )

    def _check_cores(self) -> None:
        cores = _validate.sequence("policy", "cores", self.cores, "numbers of cores")
        for core in cores:
            _validate.integer("policy", "a core", core, 0, _MAX_CORE)
        if len({*cores}) != len(cores):
            _validate.invalid("policy", "cores must differ", shown(self.cores), "name each core once")
        self._set("cores", tuple(cores))
        if self.numa_node is not None:
            _validate.integer("policy", "numa_node", self.numa_node, 0, _MAX_CORE)
            if cores:
                _validate.invalid(
                    "policy", "cores and numa_node both choose cores", "both", "pass only one of them"
                )

    @property
    def binds(self) -> bool:
        """Whether workers are bound to cores."""
        return self.bind_to_cores or bool(self.cores) or self.numa_node is not None


def _pattern(pattern: str) -> str:
    return _validate.text("policy", "a pattern of layers, templates or ops", pattern)


def _workers(name: str, value: Any, least: int = 1) -> tuple[int, ...]:
    """One worker or several, as a tuple."""
    is_one = not isinstance(value, (list, tuple))
    workers = (value,) if is_one else tuple(value)
    if len(workers) < least:
        _validate.invalid("policy", f"{name} must name a worker", "none", "pass a number, or leave it out")
    return tuple(_validate.integer("policy", name, worker, 0, _MAX_WORKER) for worker in workers)


def _entry(pattern: str, hints: object) -> TaskExecutionHints:
    own = _validate.instance(
        "policy", f"hints[{pattern!r}]", hints, TaskExecutionHints, "pass TaskExecutionHints(priority=1)"
    )
    if own.target_node is not None or own.prefetch_handles:
        _validate.invalid(
            "policy",
            "hints of a policy must have no target_node and no prefetch_handles",
            shown(own),
            "a strategy places layers on devices: DistributionStrategy.pipeline(layers_per_stage=...)",
        )
    if own.target_worker is None and own.priority == 0:
        _validate.invalid(
            "policy", f"hints[{pattern!r}] must state a worker or a priority", "neither", "leave it out"
        )
    if own.target_worker is not None:
        _validate.integer("policy", f"hints[{pattern!r}].target_worker", own.target_worker, 0, _MAX_WORKER)
    _validate.integer("policy", f"hints[{pattern!r}].priority", own.priority, -MAX_PRIORITY, MAX_PRIORITY)
    return own


DEFAULT_POLICY = ExecutionPolicy()
"""Any worker runs a task of its device, and nothing is bound, offloaded or pinned."""
