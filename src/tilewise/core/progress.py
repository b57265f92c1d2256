"""Progress of long work: the current phase, how much of it is done, and how long each piece took.

The work reports to a `Progress`, which displays or records the reports and does not affect the work. Each thread counts
in its own `ProgressCounter`, so no thread waits for another to report a piece.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Phase", "Progress", "ProgressCounter", "Span", "thread_name"]

Span = tuple[str, str, int, int]
"""One piece: thread or process, description, begin and end in ns of `time.perf_counter_ns`."""


class ProgressCounter:
    """How many pieces of a phase one thread has done."""

    def __init__(self) -> None:
        self.count = 0
        self.spans: list[Span] = []


class Phase:
    """A part of the work, counted in pieces.

    Attributes:
        name: `specification`, `gradients`.
        total: its number of pieces; None if that is not known.
        begin_ns: when it began, in ns of `time.perf_counter_ns`.
        end_ns: when it ended; None while it runs.
    """

    def __init__(self, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.begin_ns = time.perf_counter_ns()
        self.end_ns: int | None = None
        self._counters: list[ProgressCounter] = []

    def counter(self) -> ProgressCounter:
        """A new counter, to be used by one thread only."""
        counter = ProgressCounter()
        self._counters.append(counter)  # atomic under the interpreter's lock
        return counter

    @property
    def done(self) -> int:
        """Number of pieces that all threads have done so far."""
        return sum(counter.count for counter in self._counters)

    @property
    def spans(self) -> list[Span]:
        """The pieces that were recorded, thread by thread."""
        return [span for counter in self._counters for span in counter.spans]


class Progress:
    """Receives the phases of some work. This class only passes them on; subclasses display them.

    Args:
        others: also receive every phase.
    """

    def __init__(self, *others: Progress) -> None:
        self.others = others

    @property
    def wants_spans(self) -> bool:
        """Whether the times of single pieces should be recorded."""
        return any(other.wants_spans for other in self.others)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Runs a block as one phase of the work."""
        phase = Phase(name, total)
        self._began(phase)
        try:
            yield phase
        finally:
            phase.end_ns = time.perf_counter_ns()
            self._ended(phase)

    def _began(self, phase: Phase) -> None:
        for other in self.others:
            other._began(phase)

    def _ended(self, phase: Phase) -> None:
        for other in self.others:
            other._ended(phase)


def thread_name() -> str:
    """The name of the calling thread, as reports show it."""
    return threading.current_thread().name
