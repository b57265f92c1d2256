"""`Program.tasks`: every task's memory, waits and posts, as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from native.programs.sample_programs import COLS, TENSOR_BYTES, TILE_ROWS, TILES, all_reduce_program
from tilewise.core.errors import PlanError
from tilewise.runtime import Access


def rows_of(tables, name: str, task: int) -> np.ndarray:
    """A table's rows of a task, without the task's number."""
    table = tables[name]
    return table[table[:, 0] == task][:, 1:]


def test_tasks_are_those_of_a_run():
    """One row per task in order of submission; a traced program has the same tasks."""
    program = all_reduce_program(3)
    for device in range(2):
        tables = program.tasks(device)
        assert len(tables["tasks"]) == program.num_tasks(device) == 3 * 5 * TILES
        call, template, instruction, index, label = tables["tasks"][5 * TILES + TILES + 2]
        assert (call, template, instruction, index) == (1, 0, 1, 2)
        assert program.labels()[label] == "reduce"


def test_a_task_names_its_bytes_signals_and_handles():
    """The reduction of tile 1: its own share written, both partial values read, one of them a peer's."""
    program = all_reduce_program(2)
    half = TILE_ROWS // 2 * COLS * 4
    for device in range(2):
        tables = program.tasks(device)
        task = 5 * TILES + TILES + 1  # of the second call
        begin = TILE_ROWS * COLS * 4 + device * half
        stride = COLS * 4
        views = [
            [0, device, 2 * TENSOR_BYTES + begin, 2 * TENSOR_BYTES + begin + half, 2, stride, Access.OUT],
            [2, 0, TENSOR_BYTES + begin, TENSOR_BYTES + begin + half, 2, stride, Access.IN],
            [3, 1, TENSOR_BYTES + begin, TENSOR_BYTES + begin + half, 2, stride, Access.IN],
        ]
        np.testing.assert_array_equal(rows_of(tables, "views", task), views)
        np.testing.assert_array_equal(rows_of(tables, "waits", task), [[1, 2, 1 - device]])
        np.testing.assert_array_equal(rows_of(tables, "posts", task), [[1 - device, TILES + 1]])
        num_handles = program.needs(device)[1]
        accesses = [[2 * TILES + 1, 1], [TILES + 1, 0], [num_handles + TILES + 1, 1]]
        np.testing.assert_array_equal(rows_of(tables, "accesses", task), accesses)


def test_unknown_devices_lists_and_symbols_are_rejected():
    """Like `num_tasks`."""
    program = all_reduce_program(1)
    with pytest.raises(PlanError, match="got device 2"):
        program.tasks(2)
    with pytest.raises(PlanError, match="under the name; got 'step'"):
        program.tasks(0, [], "step")
    with pytest.raises(PlanError, match="got 1 for 0"):
        program.tasks(0, [3])
