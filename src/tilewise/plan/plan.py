"""`Plan`: everything decided before a run, and its explanation in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tilewise.core.errors import PlanError, ResourceError
from tilewise.core.limits import available_memory
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import Validator
from tilewise.files.writing import replace_text
from tilewise.ir.file import Unwritable
from tilewise.observe import Trace, render_plan
from tilewise.plan.costs import DeviceCosts, count_costs
from tilewise.plan.explain import explain_plan, explain_tensor
from tilewise.plan.file import digest_of
from tilewise.plan.picture import check_trace, draw_plan
from tilewise.plan.shapes import check_sizes
from tilewise.plan.tables import PlanTables
from tilewise.plan.traffic import count_file_traffic, count_traffic

__all__ = ["Plan"]

_MAX_BYTES = 1 << 62
_validate = Validator("plan", PlanError)


@dataclass(frozen=True)
class Plan(PlanTables):
    """A plan's tables, and methods that analyze it before a run."""

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
        need = self.device_bytes * self.mesh.num_devices + copies
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
        _validate.choice("traffic", "program", program, list(self.programs))
        values = check_sizes("traffic", self.shapes.symbols, {} if sizes is None else sizes)
        return count_traffic(self.program, program, tuple(values.get(s, s.max) for s in self.shapes.symbols))

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
        _validate.choice("file_traffic", "program", program, list(self.programs))
        values = check_sizes("file_traffic", self.shapes.symbols, {} if sizes is None else sizes)
        bounds = tuple(values.get(s, s.max) for s in self.shapes.symbols)
        return [
            count_file_traffic(self.program, device, program, bounds)
            for device in range(self.mesh.num_devices)
        ]

    def costs(self, program: str = "step") -> dict[int, DeviceCosts]:
        """FLOPs, bytes and bytes from peers of one run of a program, with every symbolic size at its bound.

        Args:
            program: its name.

        Returns:
            The costs of one device of each class, by the device's number.

        Raises:
            PlanError: no such program.
        """
        _validate.choice("costs", "program", program, list(self.programs))
        return {
            device: count_costs(self.program, device, program, self.symbol_bounds) for device in self.kinds
        }

    def explain(self) -> str:
        """Mesh, memory, tiles, tasks, traffic and templates as text, before anything runs."""
        return explain_plan(self)

    def why(self, name: str) -> str:
        """Why a named tensor has its tile shape and its storage shard.

        Raises:
            PlanError: there is no such tensor.
        """
        return explain_tensor(self, name)

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
            return digest_of(Plan(*(getattr(self, f.name) for f in fields(Plan))))
        except Unwritable as error:
            _validate.invalid("digest", str(error), f"the plan of {self.graph.name!r}", "use plain data")
