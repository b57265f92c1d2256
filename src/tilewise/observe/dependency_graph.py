"""The dependency graph of submitted tasks, as data and as JSON.

Owns the format that the task runtime writes (`pto_graph_begin`, `pto_graph_end`): per task what it accesses, what it
was told to come after, and what the runtime made it wait for. Refuses files that do not follow the format.
`graph_check` recomputes the dependencies from it, `graph_picture` draws it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewise.core.errors import ConfigError

__all__ = ["MODES", "DependencyGraph", "GraphParam", "GraphRegion", "GraphTask", "read_graph", "write_graph"]

VERSION = 1
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
        lane: the lane that submitted it.
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
    lane: int = 0
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
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(_message(f"a graph is a JSON file; {path} is not: {error}")) from error
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        raise ConfigError(_message(f'a graph says "version": {VERSION}; {path} does not; record it again'))
    if not isinstance(data.get("tasks"), list):
        raise ConfigError(_message(f"a graph has a list of tasks; {path} has none; record it again"))
    tasks = tuple(_task(place, row) for place, row in enumerate(data["tasks"]))
    if len({task.id for task in tasks}) != len(tasks):
        raise ConfigError(_message(f"ids are unique; {path} has some twice; record it again"))
    return DependencyGraph(tasks)


def write_graph(path: str | Path, graph: DependencyGraph) -> None:
    """Write a dependency graph as JSON, a task per line.

    Args:
        path: file to write.
        graph: what `read_graph` will return.
    """
    rows = ",\n".join(json.dumps(asdict(task)) for task in graph.tasks)
    Path(path).write_text(f'{{"version": {VERSION}, "tasks": [\n{rows}\n]}}\n', encoding="utf-8")


def _task(place: int, row: Any) -> GraphTask:
    try:
        return GraphTask(
            id=_number(row["id"]),
            kernel=str(row["kernel"]),
            name=str(row.get("name", "")),
            lane=_number(row["lane"]),
            scope=_number(row["scope"]),
            depth=_number(row["depth"]),
            domain=_number(row["domain"]),
            params=tuple(_param(entry) for entry in row["params"]),
            after=tuple(_number(a) for a in row["after"]),
            producers=tuple(_number(p) for p in row["producers"]),
            submit_ns=_number(row["submit_ns"]),
            end_ns=_number(row["end_ns"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            _message(
                f"every task has all fields of the format; task {place} of the list: {error!r}; record it again"
            )
        ) from error


def _param(row: Any) -> GraphParam:
    if row["mode"] not in MODES:
        raise ValueError(f"mode {row['mode']!r} is not one of {', '.join(MODES)}")
    region = row["region"]
    return GraphParam(
        row["mode"],
        _number(row["buffer"]),
        _number(row["bytes"]),
        None if region is None else _region(region),
    )


def _region(row: Any) -> GraphRegion:
    size, stride = tuple(map(_number, row["size"])), tuple(map(_number, row["stride"]))
    if not size or len(size) != len(stride) or min(stride) < 1 or min(size) < 0:
        raise ValueError(f"a region has as many sizes as strides, and strides of 1 or more: {size}, {stride}")
    return GraphRegion(_number(row["offset"]), size, stride)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _message(text: str) -> str:
    return f"[observe.read_graph] {text}."
