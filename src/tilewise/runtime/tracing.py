"""`Runtime.trace` and `Runtime.graph`: record the tasks of a block, or their dependency graph.

The result is a `Trace` or a `DependencyGraph`, and a file if requested. The end of the block waits
for this thread's tasks without raising their failures. While the block begins or ends, other
threads must not submit tasks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from tilewise._native.tasks import OpenRuntime
from tilewise.core.errors import TaskFailed
from tilewise.core.validation import Validator
from tilewise.observe.dependency_graph import DependencyGraph, read_graph
from tilewise.observe.graph_picture import write_graph_html
from tilewise.observe.perfetto import write_perfetto
from tilewise.observe.trace import STALL_CAUSES, Stall, TaskSpan, Trace
from tilewise.observe.trace_report import write_report

__all__ = ["GraphLog", "Tracing"]

_validate = Validator("runtime")


class Tracing:
    """`with rt.trace(...) as tracing:`; afterwards `tracing.trace` has the records.

    Attributes:
        trace: the records; empty until the block has ended.
        graph: the dependency graph of the same run, if it was requested.
    """

    def __init__(
        self,
        native: OpenRuntime,
        num_workers: int,
        paths: Sequence[str | Path],
        max_records_per_thread: int,
        graph: str | Path | None,
    ) -> None:
        self._native = native
        self._num_workers = num_workers
        self._paths = [_output_path("trace", path) for path in paths]
        self._max_records = _validate.integer(
            "trace", "max_records_per_thread", max_records_per_thread, 1, 1 << 28
        )
        self._log = None if graph is None else GraphLog(native, [graph])
        self.trace = Trace((), (), 0)

    @property
    def graph(self) -> DependencyGraph:
        """The dependency graph of the same run."""
        if self._log is None:
            _validate.invalid(
                "trace", "a graph must have been requested", "none", "call trace(..., graph='graph.json')"
            )
        return self._log.graph

    def __enter__(self) -> Tracing:
        _settle(self._native)
        self._native.trace_enable(self._max_records)
        if self._log is not None:
            try:
                self._log.__enter__()
            except BaseException:
                self._native.trace_enable(0)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._native.is_open:  # a forked child leaves its parent's block
            return
        if _is_interrupt(error):
            self._native.trace_enable(0)
            if self._log is not None:
                self._log.__exit__(kind, error, traceback)
            return
        _settle(self._native)
        self._native.trace_enable(0)
        self.trace = _trace_of(self._native, self._num_workers)
        if self._log is not None:
            self._log.__exit__(kind, error, traceback)
            self.trace = _with_producers(self.trace, self._log.graph)
        for path in self._paths:
            (write_report if path.suffix == ".html" else write_perfetto)(path, self.trace)


class GraphLog:
    """`with rt.graph(path) as log:`; afterwards `log.graph` has the dependency graph."""

    def __init__(self, native: OpenRuntime, paths: Sequence[str | Path]) -> None:
        self._native = native
        self._paths = [_output_path("graph", path) for path in paths]
        self.graph = DependencyGraph(())

    def __enter__(self) -> GraphLog:
        self._native.graph_begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._native.is_open:
            return
        if _is_interrupt(error):
            self._native.graph_end(os.devnull)
            return
        _settle(self._native)
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "graph.json"
            self._native.graph_end(str(written))
            self.graph = read_graph(written)
            for path in self._paths:
                if path.suffix == ".html":
                    write_graph_html(path, self.graph)
                else:
                    shutil.copyfile(written, path)


def _with_producers(trace: Trace, graph: DependencyGraph) -> Trace:
    """The trace with the predecessors of each task, so that its critical path follows edges, not
    times.
    """
    producers = {task.id: task.producers for task in graph.tasks}
    tasks = (replace(task, producers=producers.get(task.task, ())) for task in trace.tasks)
    return replace(trace, tasks=tuple(tasks))


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception is Ctrl-C. The block must then not wait for its tasks again, and without
    waiting there are no complete records to write.
    """
    return error is not None and not isinstance(error, Exception)


def _settle(native: OpenRuntime) -> None:
    """Wait until nothing runs, so that records can be read and recording can be switched."""
    with suppress(TaskFailed, CancelledError):  # reported by their handles
        native.wait_all(None)


def _trace_of(native: OpenRuntime, num_workers: int) -> Trace:
    names = (
        "task", "kernel", "worker", "submitter", "scope_depth", "status", "priority", "submit_ns", "ready_ns",
        "start_ns", "end_ns", "name",
    )  # fmt: skip
    rows = native.trace_tasks()
    tasks = [TaskSpan(**dict(zip(names, row))) for row in rows]
    stalls = [
        Stall(
            submitter=submitter,
            cause=STALL_CAUSES[cause],
            begin_ns=begin,
            end_ns=end,
            live_tasks=live,
            heap_used_bytes=used,
        )
        for submitter, cause, begin, end, live, used in native.trace_stalls()
    ]
    order = sorted(tasks, key=lambda task: (task.submit_ns, task.task))
    return Trace(tuple(order), tuple(stalls), num_workers)


def _output_path(call: str, path: str | Path) -> Path:
    """A path to which a file will be written when a block has ended. Its folder must exist before
    the block begins.
    """
    target = _validate.path(call, "a path", path)
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        _validate.invalid(
            call,
            "a file must be writable in a folder that exists",
            f"'{target}'",
            "make the folder, or choose another",
        )
    return target
