"""`Plan`: everything decided before a run, and its explanation in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.core.errors import PlanError, ResourceError
from tilewise.core.limits import available_memory
from tilewise.core.reading import Unreadable
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import Validator
from tilewise.core.writing import replace_file, replace_text
from tilewise.ir.file import Unwritable
from tilewise.observe import render_plan
from tilewise.plan.costs import DeviceCosts, count_costs
from tilewise.plan.explain import explain_plan, explain_tensor
from tilewise.plan.file import decode_plan, digest_of, encode_plan, read_content, require_fit
from tilewise.plan.picture import draw_plan, read_timeline
from tilewise.plan.shapes import check_sizes
from tilewise.plan.tables import PlanTables
from tilewise.plan.traffic import count_file_traffic, count_traffic

__all__ = ["Plan"]

_MAX_BYTES = 1 << 62
_validate = Validator("plan", PlanError)


@dataclass(frozen=True)
class Plan(PlanTables):
    """A plan's tables, and what can be asked of them before anything runs."""

    def require_memory(self, limit_bytes: int = 0) -> None:
        """Refuse a plan that cannot be allocated, before anything is; checkpoints count where they were planned.

        Args:
            limit_bytes: over all devices; 0 for what is available now (`core.limits.available_memory`).

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
                f", of that {format_bytes(copies)} for checkpoints that are written while training goes on"
                if copies
                else ""
            )
            raise ResourceError(
                f"[plan.require_memory] the devices' memory must fit {format_bytes(limit)}; got {format_bytes(need)} "
                f"for {num} device{'s' if num > 1 else ''}{copied}, {format_bytes(need - limit)} too much; take a "
                "smaller batch or model, accumulate, recompute, or offload"
            )

    def traffic(self, program: str = "step", sizes: Mapping[str, int] | None = None) -> dict[str, list[int]]:
        """Elements each device reads from others' memory in one run of a program, per label.

        Args:
            program: its name.
            sizes: values of symbolic sizes by name; those that are left out stand at their bounds.

        Raises:
            PlanError: no such program or symbol, or a value out of its bounds.
        """
        _validate.choice("traffic", "program", program, list(self.programs))
        values = check_sizes("traffic", self.shapes.symbols, {} if sizes is None else sizes)
        return count_traffic(self.program, program, tuple(values.get(s, s.max) for s in self.shapes.symbols))

    def file_traffic(
        self, program: str = "step", sizes: Mapping[str, int] | None = None
    ) -> list[tuple[int, int]]:
        """Bytes that each device reads from its file, and writes to it, in one run of a program; zeros where nothing
        is offloaded.

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
        """Mesh, memory, tiles, tasks, traffic and templates in words, before anything runs."""
        return explain_plan(self)

    def why(self, name: str) -> str:
        """Why a named tensor has its tile shape and its storage shard.

        Raises:
            PlanError: no such tensor.
        """
        return explain_tensor(self, name)

    def save_picture(self, path: str | Path, timeline: Sequence[Sequence[object]] = ()) -> None:
        """Write the plan as one HTML page, which loads nothing: what memory holds at every call of a step, by category;
        the calls by phase and microbatch, with what each reads from other devices, per class of devices.

        Args:
            path: where it goes; what stood there is replaced whole, or kept.
            timeline: of a traced run of this plan, as `GraphInstance.timeline()` gives it: adds a lane per worker with
                its tasks by kind and, where it has as many as the plan, when each call ran and what memory held.

        Raises:
            PlanError: the path is invalid, or the timeline has other devices, workers or tasks than this plan.
            ResourceError: it cannot be written.
        """
        where = _validate.path("save_picture", "path", path)
        tasks = read_timeline(self, timeline)
        replace_text(where, render_plan(draw_plan(self, tasks), tasks))

    # ---- files ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all. Equal plans give equal files; weights are not in it.

        Raises:
            PlanError: the path is invalid, or something in the plan has no place in a file: an
                attribute of an op that is no plain data, an optimizer whose name another class has
                taken.
            ResourceError: it cannot be written; what stood there is kept.
        """
        where = _validate.path("save", "path", path)
        try:
            content = encode_plan(self)
        except Unwritable as error:
            _validate.invalid("save", str(error), f"the plan of {self.graph.name!r}", "make it plain")
        replace_file(where, lambda temporary: _write(temporary, content))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote, here or in another process; it runs to the same bits.

        Nothing in the file is believed: it is held to its digest, to the types of all its fields and to the rules that
        planning ends with. Ops and optimizers of your own are looked up by name among those that this process has
        defined; a file imports nothing. What kernels do with their integers, and which of several like tensors a call
        names, is not proven; for files of authors you do not trust there is `tilewise.session.require_origin`.

        Raises:
            PlanError: it is no plan, is damaged, was changed or written by another version, or names an op or optimizer
                that is not defined here.
        """
        where = _validate.path("load", "path", path)
        try:
            plan = decode_plan(read_content(where), cls)
            require_fit(plan)
        except Unreadable as error:
            _validate.invalid(
                "load",
                "a plan file must be one that Plan.save wrote",
                f"{str(where)!r}: {error}",
                "plan again",
            )
        return plan

    def digest(self) -> str:
        """SHA-256 of all that the plan says: equal inputs have equal digests, in any process.

        Raises:
            PlanError: as `save`.
        """
        try:
            return digest_of(self)
        except Unwritable as error:
            _validate.invalid("digest", str(error), f"the plan of {self.graph.name!r}", "make it plain")


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
