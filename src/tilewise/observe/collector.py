"""Collects the timelines of a process's runs, and chooses the run that `tilewise trace` shows.

`collect_traces` opens a `TraceCollector` for a block. Meanwhile, whatever runs tile programs calls
`TraceCollector.run` for each run (`runtime.ExecutorTimeline` does). An executor keeps only the
timeline of its last run, so timelines are read as late as possible: before a run of another
program, before the executor is closed, and at the end of the block.

State: the collector of the process, at most one. Any thread may run programs meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from tilewise.observe.profile import Profile
from tilewise.observe.trace import Trace

__all__ = ["TraceCollector", "TraceSource", "active_collector", "collect_traces"]

_active: TraceCollector | None = None


class TraceSource(Protocol):
    """What records the tasks of runs: an executor of tile programs."""

    def record(self, enable: bool) -> None:
        """Start or stop recording."""

    def read(self) -> Trace:
        """The tasks of the last run."""


@dataclass
class _Program:
    """The runs of one program of one source."""

    seconds: float = 0.0
    last_run: int = 0


@dataclass
class _Runs:
    """The runs of one source."""

    programs: dict[str, _Program] = field(default_factory=dict)
    unread: str | None = None  # the program of the last run, whose timeline the source still has


class _Chosen(NamedTuple):
    """The run of the program on which the most time was spent so far, of those that were read."""

    seconds: float
    name: str
    number: int
    trace: Trace


class TraceCollector:
    """Chooses one run among those of a block, and keeps its records.

    Args:
        wanted: the number of the run to keep, from 1, in the order in which runs of the process
            begin. None for the last run of the program on which the process spent the most time.

    Attributes:
        num_runs: number of runs so far.
    """

    def __init__(self, wanted: int | None = None) -> None:
        self.num_runs = 0
        self._wanted = wanted
        self._lock = threading.Lock()
        self._runs: WeakKeyDictionary[TraceSource, _Runs] = WeakKeyDictionary()
        self._best: _Chosen | None = None

    def run(self, source: TraceSource, name: str, start: Callable[[], None]) -> None:
        """Run a program, and record it if it may be the chosen one.

        Args:
            source: what runs it. It is not used by another thread meanwhile.
            name: name of the program.
            start: runs the program, and returns when it has ended.
        """
        with self._lock:
            self.num_runs += 1
            number = self.num_runs
            runs = self._runs.setdefault(source, _Runs())
        if self._wanted not in (None, number):
            start()
            return
        if runs.unread is not None and runs.unread != name:
            self.read(source)
        source.record(True)
        runs.unread = None  # if the run fails, its timeline is not complete
        began = time.monotonic()
        start()
        program = runs.programs.setdefault(name, _Program())
        program.seconds += time.monotonic() - began
        program.last_run, runs.unread = number, name
        if self._wanted is not None:
            self.read(source)
            source.record(False)

    def read(self, source: TraceSource) -> None:
        """Read the timeline of a source's last run now, because the source is about to lose it."""
        runs = self._runs.get(source)
        if runs is None or runs.unread is None:
            return
        name, runs.unread = runs.unread, None
        program, trace = runs.programs[name], source.read()
        with self._lock:
            if self._best is None or program.seconds > self._best.seconds:
                self._best = _Chosen(program.seconds, name, program.last_run, trace)

    def profile(self) -> Profile | None:
        """The profile of the chosen run; None if there was no such run. Call it after the last run."""
        for source in list(self._runs):
            self.read(source)
        best = self._best
        if best is None:
            return None
        return Profile(best.trace, f"{best.name}, run {best.number} of {self.num_runs}")


def active_collector() -> TraceCollector | None:
    """The collector of this process, if a block of `collect_traces` is open."""
    return _active


@contextmanager
def collect_traces(wanted: int | None = None) -> Iterator[TraceCollector]:
    """A block in which the runs of all executors of this process are traced.

    Args:
        wanted: as in `TraceCollector`.
    """
    global _active
    before, _active = _active, TraceCollector(wanted)
    try:
        yield _active
    finally:
        _active = before
