"""The dependency graph of submitted tasks, as data and as JSON.

The task runtime writes this format (`pto_graph_begin`, `pto_graph_end`): for each task its
accesses, the predecessors that the user declared, and the tasks that the runtime made it wait for.
Files that do not follow the format are rejected. `graph_picture` draws the graph. Tests compute the
dependencies again from the accesses.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.core.errors import ConfigError
from tilewise.files.reading import Unreadable, read_json

if TYPE_CHECKING:
    from tilewise.observe.graph_file import ParamRow, TaskRow

__all__ = ["MODES", "DependencyGraph", "GraphParam", "GraphRegion", "GraphTask", "read_graph", "write_graph"]

VERSION = 1
_MAX_FILE_BYTES = 1 << 30  # some millions of tasks
MODES = ("input", "output", "inout", "commute", "reduce", "no_dep")


@dataclass(frozen=True, slots=True)
class GraphRegion:
    """A strided box of a buffer. `offset` and `stride` are in bytes, `size` is in steps, and the
    last dimension is contiguous.
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphParam:
    """How a task accesses a buffer of `bytes` bytes. Without a region, the task accesses the whole
    buffer.
    """

    mode: str
    buffer: int
    bytes: int
    region: GraphRegion | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTask:
    """One submitted task.

    Attributes:
        id: id of the task; never 0.
        kernel: name of the kernel.
        name: name of the task; may be empty.
        submitter: the submitter that submitted it.
        scope: id of the scope in which it was submitted.
        depth: nesting depth of that scope.
        domain: id of the task that submitted this one; 0 if it was submitted outside of any task.
            Only tasks of one domain are ordered by their accesses.
        params: the accesses of the task.
        after: tasks that the user declared as predecessors.
        producers: tasks that the runtime made it wait for, or would have, but found complete.
        submit_ns: when it was submitted.
        end_ns: when it ended; 0 if unknown.
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
    """Tasks in the order of submission within each domain."""

    tasks: tuple[GraphTask, ...]


def read_graph(path: str | Path) -> DependencyGraph:
    """Read a dependency graph.

    Args:
        path: JSON file that the runtime or `write_graph` wrote.

    Returns:
        The graph.

    Raises:
        ConfigError: the file is not a dependency graph. The message names the task and what is
            wrong.
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
        graph: the graph. `read_graph` returns an equal one.
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
