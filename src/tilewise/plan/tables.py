"""A plan as frozen tables: everything decided before running, and nothing that decides.

Session, simulator, tests and other processes read these; what explains them in words is in `plan.explain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewise.core.mesh import DeviceMesh
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.program import DeviceProgram, TensorEntry
from tilewise.plan.memory import Buffer
from tilewise.plan.shapes import LocalShapes, PlanSettings, round_up, symbols_of

__all__ = ["CATEGORIES", "PlanTables"]

CATEGORIES = (
    "parameters",
    "gradients",
    "carries",
    "optimizer",
    "state",
    "inputs",
    "outputs",
    "activations",
    "temporaries",
    "scratch",
    "signals",
    "engine",
)
_OWN_REGIONS = ("activations", "temporaries")


@dataclass(frozen=True)
class PlanTables:
    """A graph laid out on a mesh, cut into tiles, placed in memory and ordered.

    Attributes:
        graph: the graph with backward pass and update.
        layout: layouts of all tensors.
        settings: what was asked for.
        programs: per program name one tile program per device.
        entries: per device, every view of memory that programs bind.
        outside: per tensor that users read or write, its entries: one, or one per microbatch.
        buffers: ranges of the arena, equal on all devices.
        regions: bytes of the arena's regions: what lasts, activations, temporaries.
        first_signals: per template, where its signals begin.
        num_signals, num_handles: that every device needs.
        scratch_bytes: working memory of every worker.
        optimizer: the optimizer whose update is in the graph, if any.
        overhead: bytes per device besides its arena: `scratch` of the workers, `signals`, the task `engine`.
    """

    graph: Graph
    layout: GraphLayout
    settings: PlanSettings
    programs: Mapping[str, tuple[DeviceProgram, ...]]
    entries: tuple[tuple[TensorEntry, ...], ...]
    outside: Mapping[int, tuple[int, ...]]
    buffers: tuple[Buffer, ...]
    regions: Mapping[str, int]
    first_signals: tuple[int, ...]
    num_signals: int
    num_handles: int
    scratch_bytes: int
    optimizer: object
    overhead: Mapping[str, int]

    @property
    def mesh(self) -> DeviceMesh:
        """The devices."""
        return self.layout.mesh

    @cached_property
    def shapes(self) -> LocalShapes:
        """Local sizes of any tensor on any device."""
        return LocalShapes(self.mesh, self.settings, self.graph.reduction_chunks, symbols_of(self.graph))

    @property
    def symbol_bounds(self) -> tuple[int, ...]:
        """The upper bound of every symbol."""
        return tuple(s.max for s in self.shapes.symbols)

    @property
    def arena_bytes(self) -> int:
        """Bytes of every device's arena."""
        return max(sum(self.regions.values()), 64)

    @property
    def device_bytes(self) -> int:
        """All that a device reserves: its arena, and what its workers and its task engine need."""
        return self.arena_bytes + sum(self.overhead.values())

    def entry(self, device: int, tensor: int, part: int = 0) -> TensorEntry:
        """Where a tensor that users read or write lies on a device; its part for one microbatch."""
        return self.entries[device][self.outside[tensor][part]]

    def holder(self, tensor: int, device: int) -> int:
        """The first device that holds the same part of a tensor as `device`."""
        return self.shapes.holder(self.graph.spec(tensor), self.layout.use[tensor], device)

    def estimate_memory_usage(self) -> list[dict[str, int]]:
        """Bytes per device and category; `total` is what a device reserves when instantiated, to the byte.

        Pages that no task touches cost nothing, so a limit on resident memory sees at most this much; the interpreter,
        its libraries and the plan itself come on top.
        """
        usage = dict.fromkeys(CATEGORIES, 0)
        lasting = [b for b in self.buffers if b.first < 0]
        for b in lasting:
            usage[b.category] += round_up(b.bytes, 64)
        for name in _OWN_REGIONS:
            usage[name] += self.regions[name]
        usage |= self.overhead
        usage["total"] = self.device_bytes
        return [dict(usage) for _ in range(self.mesh.num_devices)]
