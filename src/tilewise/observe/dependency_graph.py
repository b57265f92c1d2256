"""The dependency graph of submitted tasks, as data and as JSON.

Owns the format that the task runtime writes (`pto_graph_begin`, `pto_graph_end`): per task what it accesses, what it
was told to come after, and what the runtime made it wait for. Refuses files that do not follow the format.
`graph_picture` draws it; tests recompute the dependencies from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.core.errors import ConfigError
from tilewise.core.reading import Unreadable, read_json

if TYPE_CHECKING:
    from tilewise.observe.graph_file import ParamRow, TaskRow

__all__ = ["MODES", "DependencyGraph", "GraphParam", "GraphRegion", "GraphTask", "read_graph", "write_graph"]

VERSION = 1
_MAX_FILE_BYTES = 1 << 30  # some millions of tasks
MODES = ("input", "output", "inout", "commute", "reduce", "no_dep")


@dataclass(frozen=True, slots=True)
class GraphRegion:
    """A strided box of a buffer: `offset` and `stride` in bytes, `size` in steps, the last dimension contiguous."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphParam:
    """How a task accesses a buffer of `bytes` bytes; without a region, all of it."""

    mode: str
    buffer: int
    bytes: int
    region: GraphRegion | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTask:
    """One submitted task.

    Attributes:
        id: its id; never 0.
        kernel: name of the kernel.
        name: of the task; empty: it has none.
        submitter: the submitter that submitted it.
        scope: id of the scope that it belongs to.
        depth: how deep that scope lies.
        domain: the task that submitted it; 0 outside any task. Rules apply between tasks of one domain.
        params: what it accesses.
        after: tasks that it was told to come after.
        producers: tasks that the runtime made it wait for, or looked at and found complete.
        submit_ns: when it was submitted.
        end_ns: when it ended; 0 when that is not known.
    """

    id: int
    kernel: str
    name: str = ""
    submitter: int = 0
    scope: int = 0
    depth: int = 0
    domain: int = 0
    params: tuple[GraphParam, ...] = ()
    after: tuple[int, ...] = ()
    producers: tuple[int, ...] = ()
    submit_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True)
class DependencyGraph:
    """Tasks in order of submission within each domain."""

    tasks: tuple[GraphTask, ...]


def read_graph(path: str | Path) -> DependencyGraph:
    """Read a dependency graph.

    Args:
        path: JSON file that the runtime or `write_graph` wrote.

    Returns:
        The graph.

    Raises:
        ConfigError: the file is not a dependency graph; names the task and what is wrong.
    """
    from tilewise.observe.graph_file import GraphFile

    try:
        rows = read_json(path, GraphFile, _MAX_FILE_BYTES).tasks
    except Unreadable as error:
        raise _refused(path, str(error)) from None
    if len({row.id for row in rows}) != len(rows):
        raise _refused(path, "ids must be unique, and some come twice")
    return DependencyGraph(tuple(map(_task, rows)))


def write_graph(path: str | Path, graph: DependencyGraph) -> None:
    """Write a dependency graph as JSON, a task per line.

    Args:
        path: file to write.
        graph: what `read_graph` will return.
    """
    rows = ",\n".join(json.dumps(asdict(task)) for task in graph.tasks)
    Path(path).write_text(f'{{"version": {VERSION}, "tasks": [\n{rows}\n]}}\n', encoding="utf-8")


def _task(row: TaskRow) -> GraphTask:
    lists = {
        "params": tuple(map(_param, row.params)),
        "after": tuple(row.after),
        "producers": tuple(row.producers),
    }
    return GraphTask(**{**dict(row), **lists})


def _param(row: ParamRow) -> GraphParam:
    box = row.region
    region = None if box is None else GraphRegion(box.offset, tuple(box.size), tuple(box.stride))
    return GraphParam(row.mode, row.buffer, row.bytes, region)


def _refused(path: str | Path, reason: str) -> ConfigError:
    return ConfigError(
        f'[observe.read_graph] a dependency graph must be JSON of "version": {VERSION} with a list of tasks; got '
        f"{str(path)!r}: {reason}; record it again"
    )
