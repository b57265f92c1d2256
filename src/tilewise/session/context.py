"""`ExecutionContext`: what a plan decided about single tiles, as questions and answers.

A plan decides placement before anything runs, so a context only reads it. Workers are looked up in
the tasks that the executor would run.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.comm import active_group
from tilewise.core.dtypes import dtype
from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator
from tilewise.ir.policy import ExecutionPolicy, TaskExecutionHints
from tilewise.ir.program import TaskHints, TensorEntry, upper
from tilewise.plan import PlanTables
from tilewise.runtime import Program
from tilewise.session.assemble import assemble_program
from tilewise.strategy import DistributionStrategy

if TYPE_CHECKING:
    from tilewise.session.plan import Plan

__all__ = ["ExecutionContext"]

_WRITES = 1  # a use in the executor's table of accesses
_validate = Validator("session", PlanError)


class _Tile(NamedTuple):
    """A tile: its device, the entry that has it, and its number among the entry's tiles."""

    device: int
    entry: TensorEntry
    number: int


class _Tasks(NamedTuple):
    """The tasks of the longest program on one device: hints and priority of each; handles that they
    access with task and use; and rows of memory that they view: task, first byte, end.
    """

    hints: list[tuple[TaskHints, int | None, int]]
    accesses: NDArray[np.int64]
    views: NDArray[np.int64]


class ExecutionContext:
    """Devices, workers and hints of the tiles of a plan.

    Tiles of a tensor are numbered by device, by microbatch and then by row and column. Devices that
    have copies of a part do not count. Names are those of parameters, states, inputs and outputs.

    Args:
        plan: what `ComputeGraph.plan` returned.

    Raises:
        PlanError: it is not a plan.

    Attributes:
        mpi_rank: number of this process among those of the process group; 0 without one.
        mpi_size: how many processes there are.
        dist_strategy: the strategy with which the plan was made; None for a plan without inputs.
        exec_policy: the policy, with what planning decided.

    Examples:
        >>> from tilewise import BATCH, ComputeGraph, ExecutionPolicy
        >>> graph = ComputeGraph("twice")
        >>> x = graph.input([4, 8], name="x", labels=[BATCH, None])
        >>> y = graph.output(graph.scale(x, 2.0), "y")
        >>> policy = ExecutionPolicy("explicit", workers={"scale": 1})
        >>> context = graph.plan({"dp": 2}, workers_per_device=2, policy=policy).context()
        >>> context.num_tiles("x"), context.get_tile_node("x", 2), context.get_tile_worker("x", 2)
        (4, 1, 1)
    """

    def __init__(self, plan: Plan | PlanTables) -> None:
        self.plan = _validate.instance("context", "a plan", plan, PlanTables, "pass graph.plan()")
        group = active_group()
        self.mpi_rank = 0
        self.mpi_size = 1 if group is None else group.num_processes
        inputs = getattr(plan, "inputs", None)
        self.dist_strategy: DistributionStrategy | None = None if inputs is None else inputs.request.strategy
        self.exec_policy: ExecutionPolicy = plan.settings.policy
        self._tiles: dict[str, list[_Tile]] = {}
        self._tasks: dict[int, _Tasks] = {}

    def num_tiles(self, tensor: str) -> int:
        """The number of tiles of a named tensor, on all devices.

        Raises:
            PlanError: users neither read nor write a tensor of that name.
        """
        return len(self._tiles_of(tensor))

    def get_tile_node(self, tensor: str, tile: int) -> int:
        """The device that has a tile; the first, if several have copies.

        Raises:
            PlanError: there is no such tensor or tile.
        """
        return self._tile(tensor, tile).device

    def get_tile_worker(self, tensor: str, tile: int) -> int | None:
        """The worker of the device that writes a tile, or reads it if no task writes it, as the policy
        pins or prefers it. None: any worker, or several.

        Raises:
            PlanError: as `get_tile_node`.
        """
        return self._hints_of(tensor, tile)[1]

    def get_hints(self, tensor: str, tile: int) -> TaskExecutionHints:
        """The hints of the tasks of `get_tile_worker`: the worker if it is pinned, their priority, and
        whether their inputs are fetched early.

        Raises:
            PlanError: as `get_tile_node`.
        """
        hints, worker, priority = self._hints_of(tensor, tile)
        pinned = None if hints.is_preference else worker
        return TaskExecutionHints(
            target_worker=pinned, priority=priority, prefetch_inputs=self.exec_policy.prefetch
        )

    # ---- tiles ----------------------------------------------------------------------------------------------

    def _tile(self, tensor: str, tile: int) -> _Tile:
        tiles = self._tiles_of(tensor)
        return tiles[_validate.integer("context", f"a tile of {tensor!r}", tile, 0, len(tiles) - 1)]

    def _tiles_of(self, tensor: str) -> list[_Tile]:
        tiles = self._tiles.get(tensor)
        if tiles is None:
            tiles = self._tiles[tensor] = [*self._find_tiles(self._number(tensor))]
        return tiles

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Tensors that users read or write, by name."""
        graph = self.plan.graph
        named = {graph.tensors[t].spec.name: t for t in self.plan.outside}
        return {name: t for name, t in {**named, **graph.outputs}.items() if name and t in self.plan.outside}

    def _number(self, tensor: str) -> int:
        _validate.choice("context", "a tensor", tensor, self._numbers)
        return self._numbers[tensor]

    def _find_tiles(self, tensor: int) -> list[_Tile]:
        plan, tiles = self.plan, list[_Tile]()
        for device in range(plan.mesh.num_devices):
            if not plan.has(device, tensor) or plan.holder(tensor, device) != device:
                continue
            for part in range(len(plan.outside[tensor])):
                entry = plan.entry(device, tensor, part)
                rows = entry.extent.upper(plan.symbol_bounds)
                count = -(-rows // upper(entry.tile_rows, plan.symbol_bounds)) * entry.tiles_across
                tiles += (_Tile(device, entry, number) for number in range(count))
        return tiles

    # ---- tasks ----------------------------------------------------------------------------------------------

    def _hints_of(self, tensor: str, tile: int) -> tuple[TaskHints, int | None, int]:
        """Hints, worker and priority that all tasks of a tile have in common."""
        of = self._tile(tensor, tile)
        tasks = self._tasks_of(of.device)
        chosen = {tasks.hints[task] for task in self._users(of, tasks)}
        if len(chosen) == 1:
            return chosen.pop()
        workers, priorities = {worker for _, worker, _ in chosen}, {priority for _, _, priority in chosen}
        is_soft = any(hints.is_preference for hints, _, _ in chosen)
        worker = workers.pop() if len(workers) == 1 else None
        priority = priorities.pop() if len(priorities) == 1 else 0
        return TaskHints(() if worker is None else (worker,), is_soft), worker, priority

    def _users(self, tile: _Tile, tasks: _Tasks) -> list[int]:
        """The tasks that write a tile; if no task does, those that read it."""
        handle = tile.entry.first_handle + tile.number
        own = tasks.accesses[tasks.accesses[:, 1] == handle]
        if len(own):
            writes = own[own[:, 2] == _WRITES]
            return [int(task) for task in (writes if len(writes) else own)[:, 0]]
        begin, end = self._bytes_of(tile)  # constants have no accesses
        views = tasks.views
        return [int(task) for task in views[(views[:, 1] < end) & (views[:, 2] > begin)][:, 0]]

    def _bytes_of(self, tile: _Tile) -> tuple[int, int]:
        entry, bounds = tile.entry, self.plan.symbol_bounds
        rows, row = upper(entry.tile_rows, bounds), tile.number // entry.tiles_across
        row_bytes = entry.stride * dtype(entry.dtype).itemsize
        last = min((row + 1) * rows, entry.extent.upper(bounds))
        return entry.offset + row * rows * row_bytes, entry.offset + last * row_bytes

    @cached_property
    def _native(self) -> Program:
        return assemble_program(self.plan)

    def _tasks_of(self, device: int) -> _Tasks:
        if device not in self._tasks:
            plan = self.plan
            name = "step" if "step" in plan.programs else plan.programs[0]
            table = self._native.tasks(device, list(plan.symbol_bounds), name)
            of, rows = plan.class_of(device), table["tasks"].tolist()
            counts = Counter((call, instruction) for call, _, instruction, _, _ in rows)
            hints = []
            for call, template, number, iteration, _ in rows:
                own = of.templates[template].instructions[number]
                both = own.hints.over(of.calls[name][call].hints)
                priority = own.priority if both.priority is None else both.priority
                hints.append((both, both.worker_of(iteration, counts[call, number]), priority))
            views = table["views"]
            local = views[views[:, 2] == device]
            self._tasks[device] = _Tasks(hints, table["accesses"], local[:, [0, 3, 4]])
        return self._tasks[device]
