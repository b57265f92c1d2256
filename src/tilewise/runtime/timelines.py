"""`ExecutorTimeline`: switches the timeline of an executor of tile programs on and off, reads it,
and hands it to the collector of `tilewise trace`.

The owner of an executor has one, starts all runs through it, and closes it before the executor.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise._native.programs import Executor
from tilewise.comm.group_executor import GroupExecutor
from tilewise.observe.collector import active_collector
from tilewise.observe.trace import Trace

__all__ = ["ExecutorTimeline"]


class ExecutorTimeline:
    """The timeline of an executor. One thread at a time may use it.

    Args:
        executor: the executor, of one process or of several.
        num_workers: its number of workers per device.
    """

    def __init__(self, executor: Executor | GroupExecutor, num_workers: int) -> None:
        self._executor, self._num_workers = executor, num_workers
        self._is_asked = False  # by the owner
        self._is_recording = False

    def trace(self, enable: bool) -> None:
        """Record the following runs, or do not. While a collector is active, all runs are recorded."""
        self._is_asked = enable
        self.record(enable or active_collector() is not None)

    def record(self, enable: bool) -> None:
        """Start or stop recording, for a collector. The owner's request to record stays valid."""
        enable = enable or self._is_asked
        if enable != self._is_recording:
            self._executor.trace(enable)
            self._is_recording = enable

    def read(self) -> Trace:
        """The tasks of the last run, by start, if it was recorded."""
        executor = self._executor
        dropped = executor.stats()["timeline_dropped"]
        if isinstance(executor, GroupExecutor):
            rows, error_ns = executor.timeline_with_clock()
            hosts = executor.device_hosts()
            return Trace.of_program(
                rows, self._num_workers, dropped=dropped, hosts=hosts, clock_error_ns=error_ns
            )
        return Trace.of_program(executor.timeline(), self._num_workers, dropped=dropped)

    def run(self, name: str, start: Callable[[], None]) -> None:
        """Run a program. If a collector is active, it records the run.

        Args:
            name: name of the program.
            start: runs the program, and returns when it has ended.
        """
        collector = active_collector()
        if collector is None:
            start()
        else:
            collector.run(self, name, start)

    def close(self) -> None:
        """Give the timeline to the collector, because the executor is about to be closed."""
        collector = active_collector()
        if collector is not None:
            collector.read(self)
