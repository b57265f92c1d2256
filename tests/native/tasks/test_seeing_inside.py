"""Traces, dependency graphs, counters and advice of a runtime."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from support.graph_check import GraphCheck, check_graph
from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.observe import read_graph
from tilewise.runtime import InOut, Input, Output, Runtime


def nothing(*_):
    """A Python kernel."""


def wavefront(rt, size=6):
    """Tasks on a grid, each after its upper and left neighbour; returns the producers of each by id."""
    grid = [[rt.register(np.zeros(4)) for _ in range(size)] for _ in range(size)]
    event, tasks = rt.event(), {}
    for r in range(size):
        for c in range(size):
            inputs = [Input(grid[r - 1][c])] * (r > 0) + [Input(grid[r][c - 1])] * (c > 0)
            tasks[r, c] = rt.submit(
                None if (r + c) % 3 else nothing,
                [*inputs, InOut(grid[r][c])],
                wait_for=[(event, 1)] if r == c == 0 else None,
            )
    event.post()
    near = {(r, c): [(r - 1, c), (r, c - 1)] for r, c in tasks}
    return {task.id: {tasks[at].id for at in near[place] if at in tasks} for place, task in tasks.items()}


def without_one_edge(graph):
    """The graph with one dependency of the last task removed."""
    *others, last = graph.tasks
    return replace(graph, tasks=(*others, replace(last, producers=last.producers[1:])))


def test_trace(runtime, tmp_path):
    """A traced block has one record per task, a Perfetto file, and nothing from before or after the block."""
    runtime.submit(None)
    begin = time.monotonic_ns()
    with runtime.trace(tmp_path / "trace.json") as tracing:
        expected = wavefront(runtime)
    end = time.monotonic_ns()
    runtime.submit(None)
    trace = tracing.trace
    assert [task.task for task in trace.tasks] == list(expected) and trace.num_workers == 2
    assert Counter(task.kernel for task in trace.tasks) == {"nothing": 12, "": 24}
    for task in trace.tasks:
        assert begin <= task.submit_ns <= task.ready_ns <= task.start_ns <= task.end_ns <= end
        assert task.worker in (0, 1, -1 - task.submitter) and task.status == task.scope_depth == 0
    path = trace.critical_path.tasks
    assert path[-1].end_ns == max(t.end_ns for t in trace.tasks) and not trace.critical_path.is_from_edges
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["task"] for e in events if e.get("cat") == "task"] == list(expected)
    with runtime.trace(tmp_path / "trace.html"):
        wavefront(runtime, 2)
    assert "4 tasks of 2 kernels took" in (tmp_path / "trace.html").read_text()


def test_graph(runtime, tmp_path):
    """The graph's file has every task, and the offline check agrees with the run."""
    with runtime.graph(tmp_path / "graph.json") as log:
        expected = wavefront(runtime)
    assert {t.id: set(t.producers) for t in log.graph.tasks} == expected
    assert read_graph(tmp_path / "graph.json") == log.graph
    assert check_graph(log.graph) == GraphCheck()
    assert len(check_graph(without_one_edge(log.graph)).missing) == 1
    with runtime.graph(tmp_path / "graph.html"):
        wavefront(runtime, 2)
    assert (tmp_path / "graph.html").read_text().count('<path class="edge"') == 4


def test_trace_and_graph_of_one_run(runtime, tmp_path):
    """One run gives a page, a Perfetto file and the graph; the trace then has the edges, and agrees with them."""
    paths = [tmp_path / name for name in ("run.html", "run.json", "graph.json")]
    with runtime.trace(*paths[:2], graph=paths[2]) as tracing:
        expected = wavefront(runtime)
    assert "36 tasks of 2 kernels took" in paths[0].read_text() and read_graph(paths[2]) == tracing.graph
    slices = [e for e in json.loads(paths[1].read_text())["traceEvents"] if e.get("cat") == "task"]
    for result in (
        {t.task: set(t.producers) for t in tracing.trace.tasks},
        {t.id: set(t.producers) for t in tracing.graph.tasks},
        {e["args"]["task"]: set(e["args"].get("producers", ())) for e in slices},
    ):
        assert result == expected
    path = tracing.trace.critical_path
    assert path.is_from_edges and len(path.tasks) == 11  # from corner to corner
    with runtime.graph(tmp_path / "a.html", tmp_path / "a.json") as log, runtime.trace() as inner:
        expected = wavefront(runtime, 2)
    assert {t.id for t in log.graph.tasks} == {t.task for t in inner.trace.tasks} == set(expected)
    assert (tmp_path / "a.html").read_text().count('<path class="edge"') == 4
    assert read_graph(tmp_path / "a.json") == log.graph
    with pytest.raises(ValueError, match="requested"):
        _ = inner.graph


def test_failure_in_a_traced_block(runtime):
    """A failed task does not affect the trace; its handle still raises the error."""

    def bad():
        raise ValueError

    with runtime.trace() as tracing:
        task = runtime.submit(bad)
    assert tracing.trace.tasks[0].status != 0
    with pytest.raises(TaskFailed):
        task.wait()


def test_stats_and_advice():
    """Counters count, and advice names the option of a resource that was full or much too large."""
    with Runtime(num_workers=1, window=2, heap_bytes=1 << 20) as rt:
        event = rt.event()
        first = rt.submit(None, wait_for=[(event, 1)])
        rt.submit(None)
        with rt.scope():
            rt.submit(None, [Output(bytes=1 << 20)])
        for _ in range(50):
            rt.submit(lambda: None)
        event.post()
        first.wait()
        rt.wait_all()
        stats = rt.stats()
    assert stats.num_submitted == stats.num_completed == 53 and stats.num_failed == 0
    assert stats.window == 2 and stats.heap_high_bytes == 1 << 20
    text = " ".join(stats.advice())
    assert "window=4" in text and "heap_bytes=2097152" in text
    with Runtime(num_workers=1) as rt:
        assert "would do" in " ".join(rt.stats().advice())


def test_a_traced_block_ended_by_ctrl_c_writes_nothing(runtime, tmp_path):
    """It does not wait for its tasks, so the trace would be incomplete; an error of the program still writes it."""
    event = runtime.event()
    rescue = threading.Timer(5, event.post)  # of a block that waits all the same
    rescue.start()
    with pytest.raises(KeyboardInterrupt), runtime.trace(tmp_path / "a.json") as tracing:
        task = runtime.submit(None, wait_for=[(event, 1)])
        raise KeyboardInterrupt
    assert not task.is_complete() and tracing.trace.tasks == ()
    with pytest.raises(KeyboardInterrupt), runtime.graph(tmp_path / "b.json") as log:
        runtime.submit(None, wait_for=[(event, 1)])
        raise KeyboardInterrupt
    assert log.graph.tasks == () and list(tmp_path.iterdir()) == []
    rescue.cancel()
    event.post()
    with pytest.raises(KeyError), runtime.trace(tmp_path / "a.json") as tracing:
        runtime.submit(None)
        raise KeyError
    assert len(tracing.trace.tasks) == 1 and (tmp_path / "a.json").is_file()


def test_one_trace_and_one_graph_at_a_time(runtime, tmp_path):
    """A nested one is rejected without effect; one that Ctrl-C ended does not block the next."""
    with runtime.trace() as tracing:
        runtime.submit(None, name="one")
        with pytest.raises(ConfigError, match="one trace at a time"), runtime.trace():
            pass
        runtime.submit(None, name="two")
    assert [task.name for task in tracing.trace.tasks] == ["one", "two"]
    with (
        runtime.graph(),
        pytest.raises(ConfigError, match="one graph at a time"),
        runtime.trace(graph=tmp_path / "g.json"),
    ):
        pass
    for block in (runtime.graph, lambda: runtime.trace(graph=tmp_path / "g.json")):
        with pytest.raises(KeyboardInterrupt), block():
            raise KeyboardInterrupt
        with runtime.trace() as tracing, runtime.graph() as log:
            runtime.submit(None)
        assert len(tracing.trace.tasks) == len(log.graph.tasks) == 1
