"""Traces, dependency graphs, counters and advice of a runtime."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.observe import check_graph, read_graph
from tilewise.runtime import InOut, Input, Output, Runtime, TaskSpan


def wavefront(rt, size=6):
    """Tasks on a grid, each after its upper and left neighbour."""
    grid = [[rt.register(np.zeros(4)) for _ in range(size)] for _ in range(size)]
    for r in range(size):
        for c in range(size):
            inputs = [Input(grid[r - 1][c])] * (r > 0) + [Input(grid[r][c - 1])] * (c > 0)
            rt.submit(None if (r + c) % 3 else lambda *_: None, [*inputs, InOut(grid[r][c])])
    return size * size


def test_trace(runtime, tmp_path):
    """A traced block gives one record per task, a Perfetto file, and nothing of what came before or after."""
    runtime.submit(None)
    with runtime.trace(tmp_path / "trace.json") as tracing:
        count = wavefront(runtime)
    runtime.submit(None)
    trace = tracing.trace
    assert len(trace.tasks) == count and trace.num_workers == 2
    for task in trace.tasks:
        assert 0 < task.submit_ns <= task.start_ns <= task.end_ns
    assert trace.critical_path.tasks and {"python" in t.kernel or "lambda" in t.kernel for t in trace.tasks}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    with runtime.trace(tmp_path / "trace.html"):
        wavefront(runtime, 2)
    assert "<html" in (tmp_path / "trace.html").read_text()


def test_graph(runtime, tmp_path):
    """The graph's file has every task, and the offline check agrees with what the runtime did."""
    with runtime.graph(tmp_path / "graph.json") as log:
        count = wavefront(runtime)
    assert len(log.graph.tasks) == count and not check_graph(log.graph).missing
    with runtime.graph(tmp_path / "graph.html"):
        wavefront(runtime, 2)
    assert "<html" in (tmp_path / "graph.html").read_text()


def test_trace_and_graph_of_one_run(runtime, tmp_path):
    """One run gives a page, a Perfetto file and the graph; the trace then knows the edges, and follows them."""
    paths = [tmp_path / name for name in ("run.html", "run.json", "graph.json")]
    with runtime.trace(*paths[:2], graph=paths[2]) as tracing:
        count = wavefront(runtime)
    assert [path.exists() for path in paths] == [True] * 3
    assert "<html" in paths[0].read_text() and json.loads(paths[1].read_text())["traceEvents"]
    assert len(tracing.graph.tasks) == len(tracing.trace.tasks) == count
    assert {t.task: set(t.producers) for t in tracing.trace.tasks} == {
        t.id: set(t.producers) for t in tracing.graph.tasks
    }
    assert tracing.trace.critical_path.is_from_edges and isinstance(tracing.trace.tasks[0], TaskSpan)
    with runtime.graph(tmp_path / "a.html", tmp_path / "a.json") as log, runtime.trace() as inner:
        wavefront(runtime, 2)
    assert len(log.graph.tasks) == len(inner.trace.tasks) == 4
    assert "<html" in (tmp_path / "a.html").read_text() and read_graph(tmp_path / "a.json") == log.graph
    with pytest.raises(ValueError, match="asked for"):
        _ = inner.graph


def test_failure_in_a_traced_block(runtime):
    """A failed task does not spoil the trace; its handle still tells."""

    def bad():
        raise ValueError

    with runtime.trace() as tracing:
        task = runtime.submit(bad)
    assert tracing.trace.tasks[0].status != 0
    with pytest.raises(TaskFailed):
        task.wait()


def test_stats_and_advice():
    """Counters count, and advice names the knob of what was full or far too large."""
    with Runtime(num_workers=1, window=2, heap_bytes=1 << 20) as rt:
        event = rt.event()
        first = rt.submit(None, wait_for=[(event, 1)])
        rt.submit(None)
        with rt.scope():
            rt.submit(None, [Output(bytes=1 << 20)])
        for _ in range(50):
            rt.submit(lambda: None)
        event.raise_()
        first.wait()
        rt.wait_all()
        stats = rt.stats()
    assert stats.num_submitted == stats.num_completed == 53 and stats.num_failed == 0
    assert stats.window == 2 and stats.heap_high_bytes == 1 << 20
    text = " ".join(stats.advice())
    assert "window=4" in text and "heap_bytes=2097152" in text
    with Runtime(num_workers=1) as rt:
        assert "would do" in " ".join(rt.stats().advice())


def test_one_trace_and_one_graph_at_a_time(runtime):
    """A second one inside is refused and harms neither; one that Ctrl-C ended does not stand in the next one's way."""
    with runtime.trace() as tracing:
        runtime.submit(None, name="one")
        with pytest.raises(ConfigError, match="one trace at a time"), runtime.trace():
            pass
        runtime.submit(None, name="two")
    assert [task.name for task in tracing.trace.tasks] == ["one", "two"]
    with (
        runtime.graph(),
        pytest.raises(ConfigError, match="one graph at a time"),
        runtime.trace(graph="g.json"),
    ):
        pass
    for block in (runtime.graph, lambda: runtime.trace(graph="g.json")):
        with pytest.raises(KeyboardInterrupt), block():
            raise KeyboardInterrupt
        with runtime.trace() as tracing, runtime.graph() as log:
            runtime.submit(None)
        assert len(tracing.trace.tasks) == len(log.graph.tasks) == 1
