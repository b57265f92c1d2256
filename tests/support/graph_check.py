"""Oracle for dependency graphs: finds missing edges and false dependencies in what the task runtime recorded.

Recomputes from the accesses alone, in order of submission within each domain, which pairs of tasks must be ordered:
read-after-write, write-after-write and write-after-read on every byte, and explicit edges. It shares no code with the
runtime's own search for dependencies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from support.region_overlap import RegionTable
from tilewise.observe.dependency_graph import DependencyGraph, GraphParam, GraphTask

__all__ = ["GraphCheck", "check_graph"]

# Accesses of one kind run next to each other, or in any order, except writes.
KINDS = {
    "input": "read",
    "output": "write",
    "inout": "write",
    "commute": "commute",
    "reduce": "reduce",
}
RULES = {("write", "read"): "read-after-write", ("read", "write"): "write-after-read"}
BLOCK = 4096  # tasks whose successors are found in one sweep: bounds the memory


@dataclass(frozen=True)
class GraphCheck:
    """What the check found.

    Attributes:
        missing: pairs (first, second) of ids that must be ordered and are not; pairs that follow from others are left
            out, so a lost edge is named once.
        unneeded: pairs (producer, task) where the task waited and no rule asks for it: a false dependency.
        num_outside: edges from tasks that the graph does not hold; they are not judged.
        errors: a sentence for each missing pair, or one for a cycle.
        warnings: a sentence for each unneeded edge.
    """

    missing: tuple[tuple[int, int], ...] = ()
    unneeded: tuple[tuple[int, int], ...] = ()
    num_outside: int = 0
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def check_graph(graph: DependencyGraph) -> GraphCheck:
    """Recompute the dependencies from the accesses and compare them with what the runtime did.

    Two tasks of one domain must be ordered when they access a common byte, unless both read it, both commute on it or
    both reduce into it (no order is asked for, though the runtime may combine partials in turn), or one of them says
    `no_dep`; and when one names the other as `after`. They are ordered when a path of producers leads from the first
    to the second (a task ends after the tasks that it submitted), or when the first ended before the second was
    submitted.

    Args:
        graph: what the runtime recorded.

    Returns:
        Missing and unneeded edges. Edges that exact rules do not ask for are legal, but cost parallelism.

    Cost: about 0.1 ms per task for graphs of some thousand tasks.
    """
    accesses = _Accesses(graph)
    required = _required(graph, accesses)
    index = {task.id: place for place, task in enumerate(graph.tasks)}
    actual = [[index[p] for p in task.producers if p in index] for task in graph.tasks]
    try:
        order = _order(graph, index, [[*a, *r] for a, r in zip(actual, required)])
    except CycleError as error:
        return GraphCheck(errors=(_cycle_message(graph, error.args[1]),))
    missing = _missing(
        graph, required, _predecessors(graph, index, actual), _predecessors(graph, index, required), order
    )
    unneeded = [
        (p, t)
        for t, producers in enumerate(actual)
        for p in producers
        if not accesses.may_wait(p, t) and graph.tasks[p].id not in graph.tasks[t].after
    ]
    return GraphCheck(
        missing=tuple((graph.tasks[a].id, graph.tasks[b].id) for a, b in missing),
        unneeded=tuple((graph.tasks[a].id, graph.tasks[b].id) for a, b in unneeded),
        num_outside=sum(p not in index for task in graph.tasks for p in task.producers),
        errors=tuple(_missing_message(graph, accesses, a, b) for a, b in missing),
        warnings=tuple(
            f"{_title(graph.tasks[b])} waited for {_title(graph.tasks[a])}, and no rule asks for it"
            for a, b in unneeded
        ),
    )


class _Accesses:
    """The tracked parameters of all tasks, and which of them conflict."""

    def __init__(self, graph: DependencyGraph) -> None:
        self.tasks = graph.tasks
        regions: defaultdict[int, list[GraphParam]] = defaultdict(list)
        for task in graph.tasks:
            for param in task.params:
                regions[param.buffer].append(param)
        self.tables = {buffer: RegionTable([p.region for p in params]) for buffer, params in regions.items()}
        self.of_task = [
            [
                (p.buffer, self.tables[p.buffer].numbers[p.region], KINDS[p.mode])
                for p in task.params
                if p.mode in KINDS
            ]
            for task in graph.tasks
        ]

    def common(self, first: int, second: int) -> list[tuple[int, str, str]]:
        """Buffer and kinds of every two accesses of these tasks that share a byte."""
        return [
            (buffer, kind, other_kind)
            for buffer, region, kind in self.of_task[first]
            for other_buffer, other, other_kind in self.of_task[second]
            if buffer == other_buffer and self.tables[buffer].has_overlap(region, other)
        ]

    def may_wait(self, first: int, second: int) -> bool:
        return self.tasks[first].domain == self.tasks[second].domain and any(
            _is_conflict(a, b) or a == b == "reduce" for _, a, b in self.common(first, second)
        )


def _is_conflict(first: str, second: str) -> bool:
    return first != second or first == "write"


class _BufferState:
    """Who accessed each region of a buffer in one domain, as far as later tasks must still wait for them."""

    def __init__(self, table: RegionTable) -> None:
        self._table = table
        self._of_region: defaultdict[int, defaultdict[str, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def conflicting(self, region: int, kind: str) -> list[int]:
        """Earlier tasks that must precede an access."""
        return [
            task
            for other in self._table.overlapping(region, self._of_region)
            for other_kind, tasks in self._of_region[other].items()
            if _is_conflict(other_kind, kind)
            for task in tasks
        ]

    def add(self, region: int, kind: str, task: int) -> None:
        """Record an access; a write hides the earlier accesses that it covers, because conflicts reach it too."""
        if kind == "write":
            for other in self._table.inside(region):
                self._of_region.pop(other, None)
        self._of_region[region][kind].append(task)


def _required(graph: DependencyGraph, accesses: _Accesses) -> list[list[int]]:
    """For each task those that must come before it; pairs implied by others may be omitted."""
    index = {task.id: place for place, task in enumerate(graph.tasks)}
    states: dict[tuple[int, int], _BufferState] = {}
    required = []
    for place, task in enumerate(graph.tasks):
        first = {index[a] for a in task.after if a in index}
        for buffer, region, kind in accesses.of_task[place]:
            if (task.domain, buffer) not in states:
                states[task.domain, buffer] = _BufferState(accesses.tables[buffer])
            first.update(states[task.domain, buffer].conflicting(region, kind))
        for buffer, region, kind in accesses.of_task[place]:
            states[task.domain, buffer].add(region, kind, place)
        required.append(sorted(first))
    return required


def _predecessors(graph: DependencyGraph, index: dict[int, int], edges: list[list[int]]) -> list[list[int]]:
    """A task's start is node 2 i and its end 2 i + 1: a start follows the ends of its producers and its parent's start;
    an end follows its start and the ends of its children."""
    before: list[list[int]] = [[] for _ in range(2 * len(graph.tasks))]
    for place, task in enumerate(graph.tasks):
        before[2 * place] += [2 * p + 1 for p in edges[place]]
        before[2 * place + 1].append(2 * place)
        parent = index.get(task.domain)
        if parent is not None:
            before[2 * place].append(2 * parent)
            before[2 * parent + 1].append(2 * place + 1)
    return before


def _order(graph: DependencyGraph, index: dict[int, int], edges: list[list[int]]) -> list[int]:
    """Starts and ends, each after its predecessors."""
    return list(TopologicalSorter(dict(enumerate(_predecessors(graph, index, edges)))).static_order())


def _missing(
    graph: DependencyGraph,
    required: list[list[int]],
    actual_before: list[list[int]],
    required_before: list[list[int]],
    order: list[int],
) -> list[tuple[int, int]]:
    """Required pairs without a path, unless other required pairs imply them."""
    missing = []
    for first in range(0, len(graph.tasks), BLOCK):
        block = range(first, first + BLOCK)
        reached = _reached(actual_before, order, block)
        implied = _reached(required_before, order, block)
        for later, earlier_tasks in enumerate(required):
            unreached = [e for e in earlier_tasks if e in block and not reached[2 * later] >> (e - first) & 1]
            by_others = 0  # a task does not come before itself, so its own bits add nothing to its case
            for earlier in earlier_tasks if unreached else ():
                by_others |= implied[2 * earlier]
            missing += [
                (earlier, later)
                for earlier in unreached
                if not by_others >> (earlier - first) & 1
                and not _is_over(graph.tasks[earlier], graph.tasks[later])
            ]
    return missing


def _reached(before: list[list[int]], order: list[int], block: range) -> list[int]:
    """For each node the tasks of the block that end before it, as bits."""
    reached = [0] * len(before)
    for node in order:
        bits = 0
        for other in before[node]:
            bits |= reached[other]
        if node % 2 and node // 2 in block:
            bits |= 1 << (node // 2 - block.start)
        reached[node] = bits
    return reached


def _is_over(earlier: GraphTask, later: GraphTask) -> bool:
    """Whether one had ended when the other was submitted, where both times are recorded."""
    return 0 < earlier.end_ns <= later.submit_ns


def _title(task: GraphTask) -> str:
    return f"task {task.id} ({task.kernel})"


def _missing_message(graph: DependencyGraph, accesses: _Accesses, first: int, second: int) -> str:
    earlier, later = graph.tasks[first], graph.tasks[second]
    reasons = [
        f"{RULES.get((a, b), 'write-after-write' if a == b else f'{b}-after-{a}')} of buffer {buffer}"
        for buffer, a, b in (accesses.common(first, second) if earlier.domain == later.domain else ())
        if _is_conflict(a, b)
    ]
    if earlier.id in later.after:
        reasons.append("an explicit edge")
    why = ", ".join(dict.fromkeys(reasons))
    return f"{_title(later)} must come after {_title(earlier)} ({why}), and nothing orders them"


def _cycle_message(graph: DependencyGraph, nodes: list[int]) -> str:
    tasks = dict.fromkeys(_title(graph.tasks[node // 2]) for node in nodes)
    return f"these tasks wait for each other, against their order of submission: {', '.join(tasks)}"
