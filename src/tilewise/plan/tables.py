"""`PlanTables`: everything that is decided before a run, as frozen tables, and its explanation.

The session, the simulator, tests and other processes read the tables. `session.Plan` adds the inputs
from which they were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewise.core.errors import PlanError, ResourceError
from tilewise.core.frozen import FrozenMap, freeze_maps
from tilewise.core.limits import available_memory
from tilewise.core.mesh import DeviceMesh
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import Validator
from tilewise.files.writing import replace_text
from tilewise.ir.file import Unwritable
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.program import DeviceClass, TensorEntry, TileProgram
from tilewise.observe import Trace, render_plan
from tilewise.plan.costs import DeviceCosts, count_costs
from tilewise.plan.explain import explain_plan
from tilewise.plan.file import digest_of
from tilewise.plan.memory import most_at_one_time
from tilewise.plan.passes import idle_shares, walk_by_flops
from tilewise.plan.picture import check_trace, draw_plan
from tilewise.plan.place import Placement
from tilewise.plan.shapes import LocalShapes, PlanSettings, check_sizes, round_up, symbols_of
from tilewise.plan.stored_parts import StoredPart, assign_stored_parts
from tilewise.plan.traffic import count_file_traffic, count_traffic
from tilewise.plan.why import explain_why

__all__ = ["PlanTables"]

_MAX_BYTES = 1 << 62
_CATEGORIES = (
    "parameters",
    "gradients",
    "carries",
    "rings",
    "optimizer",
    "checkpoints",
    "state",
    "inputs",
    "outputs",
    "gathered",
    "activations",
    "temporaries",
    "scratch",
    "signals",
    "engine",
    "offloaded",
)
_validate = Validator("plan", PlanError)


@dataclass(frozen=True)
class PlanTables:
    """A graph laid out on a mesh, divided into tiles, placed in memory and ordered.

    Attributes:
        graph: the graph with backward pass and update.
        layout: layouts of all tensors.
        settings: the plan's settings.
        kinds: a device of each class.
        program: what the devices execute: templates, entries and calls per class, and each device's
            own numbers.
        outside: per tensor that users read or write, its entries: one, or one per microbatch.
        placements: per stage of the pipeline, where everything is in a device's arena and file.
            Without a pipeline there is one stage.
        num_signals, num_handles: numbers that every device needs.
        scratch_bytes: scratch memory of every worker.
        layouts: per template, the layout of the graph that it lowers; a last template of copies has
            none.
        optimizer: the optimizer whose update is in the graph, if any.
        overhead: bytes per device besides its arena: `scratch` of the workers, `signals`, the task
            `engine`.
        definition: the digest of the user's definition of the graph, before any pass; empty if only
            a graph with all passes was given.
    """

    graph: Graph
    layout: GraphLayout
    settings: PlanSettings
    kinds: tuple[int, ...]
    program: TileProgram
    outside: Mapping[int, tuple[int, ...]]
    placements: tuple[Placement, ...]
    num_signals: int
    num_handles: int
    scratch_bytes: int
    layouts: tuple[GraphLayout, ...]
    optimizer: object
    overhead: Mapping[str, int]
    definition: str = ""

    def __post_init__(self) -> None:
        freeze_maps(self, "outside", "overhead")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies only the fields, without cached values."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    @property
    def mesh(self) -> DeviceMesh:
        """The devices."""
        return self.layout.mesh

    @cached_property
    def shapes(self) -> LocalShapes:
        """Local sizes of any tensor on any device."""
        return LocalShapes(
            self.mesh,
            self.settings,
            self.graph.k_splits,
            symbols_of(self.graph),
            kinds=self.kinds,
        )

    @property
    def symbol_bounds(self) -> tuple[int, ...]:
        """The upper bound of every symbol."""
        return self.shapes.bounds

    @cached_property
    def arena_bytes(self) -> tuple[int, ...]:
        """Bytes of each device's arena."""
        return tuple(self.placement(device).arena_bytes for device in range(self.mesh.num_devices))

    @property
    def file_bytes(self) -> int:
        """Bytes of every device's file: those of the largest. 0 if nothing is offloaded."""
        return max(placement.file_bytes for placement in self.placements)

    @property
    def total_bytes(self) -> int:
        """All memory that the devices reserve: their arenas, and the memory of their workers and
        task engines.
        """
        return sum(self.arena_bytes) + self.mesh.num_devices * sum(self.overhead.values())

    def placement(self, device: int) -> Placement:
        """Where everything is in a device's memory and file."""
        return self.placements[self.layout.stage_of(device)]

    def has(self, device: int, tensor: int) -> bool:
        """Whether a device has a part of a tensor that users read or write: whether its stage has
        the tensor.
        """
        return self.layout.stage_of(device) in self.layout.stages_of(tensor)

    @cached_property
    def stored_parts(self) -> Mapping[int, tuple[StoredPart, ...]]:
        """The parts of every tensor of the training state, by its id, and which device writes each."""
        return FrozenMap(assign_stored_parts(self.graph, self.layout, self.shapes))

    @cached_property
    def checkpoint_bytes(self) -> tuple[int, ...]:
        """The size of each device's part of the copy from which checkpoints are written: its parts
        of fp32 parameters and of optimizer states. The copy is outside of the devices' memory. All
        are 0 if no checkpoints were planned.
        """
        each = [0] * self.mesh.num_devices
        for parts in self.stored_parts.values() if self.settings.is_checkpointed else ():
            for part in parts:
                each[part.device] += part.num_bytes
        return tuple(each)

    @cached_property
    def gradients_in_passing(self) -> frozenset[int]:
        """Gradients that have memory only from the backward pass until the next forward pass uses it."""
        buffers = (b for placement in self.placements for b in placement.buffers)
        return frozenset(b.key[1] for b in buffers if b.category == "gradients" and b.first >= 0)  # type: ignore[misc]

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the programs that can be run."""
        return tuple(self.program.classes[0].calls)

    def class_of(self, device: int) -> DeviceClass:
        """The class of a device.

        Raises:
            PlanError: there is no such device.
        """
        device = _validate.integer("class_of", "device", device, 0, len(self.program.devices) - 1)
        return self.program.classes[self.program.devices[device].class_id]

    def entry(self, device: int, tensor: int, part: int = 0) -> TensorEntry:
        """The entry, on a device, of a tensor that users read or write, or of its part for one
        microbatch.

        Raises:
            PlanError: there is no such device or part, or users neither read nor write the tensor.
        """
        tensor = self._tensor("entry", tensor)
        parts = self.outside.get(tensor, ())
        if not parts:
            _validate.invalid(
                "entry",
                "users must be able to read or write the tensor",
                f"{tensor}, {self.graph.spec(tensor)}, which exists only inside the devices",
                "make it an output",
            )
        return self.class_of(device).entries[
            parts[_validate.integer("entry", "part", part, 0, len(parts) - 1)]
        ]

    def holder(self, tensor: int, device: int) -> int:
        """The first device that holds the same part of a tensor as `device`.

        Raises:
            PlanError: there is no such tensor or device.
        """
        tensor = self._tensor("holder", tensor)
        device = _validate.integer("holder", "device", device, 0, self.mesh.num_devices - 1)
        spec, stages = self.graph.spec(tensor), self.layout.stages_of(tensor)
        return self.shapes.holder(spec, self.layout.storage[tensor], device, stages)

    def _tensor(self, call: str, tensor: int) -> int:
        return _validate.integer(call, "a tensor", tensor, 0, len(self.graph.tensors) - 1)

    def estimate_memory_usage(self) -> list[dict[str, int]]:
        """Bytes per device and category. `total` is exactly what a device reserves when
        instantiated, plus its part of the copy for checkpoints if planned. Three categories share a
        region: `gradients` has all of them; `gathered` has the largest sum of weights gathered from
        storage shards, as far as gradients leave room; `activations` has the rest. Devices of one
        stage differ only in `checkpoints`. `offloaded` are bytes of the device's file and not part
        of the total.

        Pages that no task touches cost nothing, so a limit on resident memory sees at most this
        much. The interpreter, its libraries and the plan itself need additional memory.
        """
        stages = [self._usage_of(placement) for placement in self.placements]
        usages = []
        for device, copy in enumerate(self.checkpoint_bytes):
            total = self.arena_bytes[device] + sum(self.overhead.values()) + copy
            usages.append(stages[self.layout.stage_of(device)] | {"checkpoints": copy, "total": total})
        return usages

    def _usage_of(self, placement: Placement) -> dict[str, int]:
        """Bytes per category of a device of one stage."""
        usage = dict.fromkeys(_CATEGORIES, 0)
        lasting = [b for b in placement.buffers if b.first < 0 and b.category != "offloaded"]
        for b in lasting:
            usage[b.category] += round_up(b.bytes, 64)
        for name in ("activations", "temporaries"):
            usage[name] += placement.regions[name]
        usage["offloaded"] = placement.file_bytes
        passing = [b for b in placement.buffers if b.first >= 0]
        for category in ("gradients", "gathered"):
            most = most_at_one_time([b for b in passing if b.category == category])
            own = min(most, usage["activations"])
            usage[category] += own
            usage["activations"] -= own
        return {**usage, **self.overhead}

    def require_memory(self, limit_bytes: int = 0) -> None:
        """Reject a plan that does not fit in memory, before anything is allocated. Planned
        checkpoints count.

        Args:
            limit_bytes: over all devices; 0 for the memory that is available now
                (`core.limits.available_memory`).

        Raises:
            ResourceError: the devices together need more.
        """
        _validate.integer("require_memory", "limit_bytes", limit_bytes, 0, _MAX_BYTES)
        limit = limit_bytes or available_memory()
        copies = sum(self.checkpoint_bytes)
        need = self.total_bytes + copies
        if need > limit:
            num = self.mesh.num_devices
            copied = (
                f", including {format_bytes(copies)} for checkpoints written during training"
                if copies
                else ""
            )
            raise ResourceError(
                f"[plan.require_memory] the devices' memory must fit {format_bytes(limit)}; got {format_bytes(need)} "
                f"for {num} device{'s' if num > 1 else ''}{copied}, {format_bytes(need - limit)} too much; use a "
                "smaller batch or model, accumulate, recompute, or offload"
            )

    def traffic(self, program: str = "step", sizes: Mapping[str, int] | None = None) -> dict[str, list[int]]:
        """Elements that each device reads from others' memory in one run of a program, per label.

        Args:
            program: its name.
            sizes: values of symbolic sizes by name; the others are at their bounds.

        Raises:
            PlanError: there is no such program or symbol, or a value is out of its bounds.
        """
        return count_traffic(self.program, program, self._sizes("traffic", program, sizes))

    def file_traffic(
        self, program: str = "step", sizes: Mapping[str, int] | None = None
    ) -> list[tuple[int, int]]:
        """Bytes that each device reads from its file and writes to it in one run of a program;
        zeros if nothing is offloaded.

        Args:
            program: its name.
            sizes: as for `traffic`.

        Raises:
            PlanError: as `traffic`.
        """
        values, devices = self._sizes("file_traffic", program, sizes), range(self.mesh.num_devices)
        return [count_file_traffic(self.program, device, program, values) for device in devices]

    def _sizes(self, call: str, program: str, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The value of every symbol in a run of a program: a user's, or its bound."""
        _validate.choice(call, "program", program, list(self.programs))
        values = check_sizes(call, self.shapes.symbols, {} if sizes is None else sizes)
        return tuple(values.get(s, s.max) for s in self.shapes.symbols)

    def costs(self, program: str = "step") -> dict[int, DeviceCosts]:
        """FLOPs, bytes and bytes from peers of one run of a program, with every symbolic size at its bound.

        Args:
            program: its name.

        Returns:
            The costs of one device of each class, by the device's number.

        Raises:
            PlanError: no such program.
        """
        bounds = self._sizes("costs", program)
        return {device: count_costs(self.program, device, program, bounds) for device in self.kinds}

    def idle_shares(self) -> tuple[float, ...]:
        """Per stage of a pipeline, the share of a step in which its devices wait for other stages, if
        passes take as long as their floating-point operations. Without a pipeline, one 0.
        """
        if self.layout.stages is None or "step" not in self.programs:
            return (0.0,) * self.layout.num_stages
        return tuple(float(share) for share in idle_shares(walk_by_flops(self)))

    def explain(self) -> str:
        """Mesh, policy, memory, tiles, tasks, traffic and templates as text, before anything runs."""
        return explain_plan(self)

    def why(self, name: str) -> str:
        """Why a named tensor has its layout, its tiles and its devices, and which workers use it; or
        why a layer or an op runs where it does.

        Args:
            name: name of a tensor, or the label of a layer or op in `print(plan.graph)`.

        Raises:
            PlanError: there is nothing of that name.
        """
        return explain_why(self, name)

    def save_picture(self, path: str | Path, trace: Trace | None = None) -> None:
        """Write the plan as one HTML page that loads nothing: memory use at every call of a step by
        category, and the calls by phase and microbatch with what each reads from other devices, per
        class of devices.

        Args:
            path: the page's path. An existing file is replaced completely, or unchanged after an error.
            trace: the `GraphInstance.timeline()` of a traced run of this plan. It adds a row per
                worker with its tasks by kind and, if it has as many tasks as the plan, when each
                call ran and how much memory was in use.

        Raises:
            PlanError: the path is invalid, or the trace has other devices, workers or tasks than
                this plan.
            ResourceError: it cannot be written.
        """
        where = _validate.path("save_picture", "path", path)
        tasks = trace.tasks if trace is not None else ()
        if trace is not None:
            check_trace(self, trace)
        replace_text(where, render_plan(draw_plan(self, tasks), tasks))

    def digest(self) -> str:
        """SHA-256 of the whole plan. Equal inputs have equal digests, in any process.

        Raises:
            PlanError: as `save`.
        """
        try:
            return digest_of(PlanTables(*(getattr(self, f.name) for f in fields(PlanTables))))
        except Unwritable as error:
            _validate.invalid("digest", str(error), f"the plan of {self.graph.name!r}", "use plain data")
