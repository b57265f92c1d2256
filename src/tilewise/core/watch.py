"""`Watch`: what work tells those who look at it: which phase it is in, how much of that is done, and how long each
piece took. Nothing depends on what they do with it.

A phase is counted in cells, one for each thread, so that no thread waits for another to say that it has done a piece.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Cell", "Phase", "Span", "Watch", "thread_name"]

Span = tuple[str, str, int, int]
"""Of one piece: the thread or process, what it was, begin and end in ns of `time.perf_counter_ns`."""


class Cell:
    """What one thread has done of a phase."""

    def __init__(self) -> None:
        self.count = 0
        self.spans: list[Span] = []


class Phase:
    """A part of the work that is counted.

    Attributes:
        name: `specification`, `gradients`.
        total: pieces of it; None where that is not known.
        begin_ns: of `time.perf_counter_ns`.
        end_ns: the same; None while it lasts.
    """

    def __init__(self, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.begin_ns = time.perf_counter_ns()
        self.end_ns: int | None = None
        self._cells: list[Cell] = []

    def cell(self) -> Cell:
        """A new cell, for one thread alone."""
        found = Cell()
        self._cells.append(found)  # one operation, which no other thread sees half of
        return found

    @property
    def done(self) -> int:
        """Pieces that all threads have done so far."""
        return sum(cell.count for cell in self._cells)

    @property
    def spans(self) -> list[Span]:
        """What pieces were taken down, thread by thread."""
        return [span for cell in self._cells for span in cell.spans]


class Watch:
    """Looks at work phase by phase. This one only passes phases on to others.

    Args:
        others: watches that see all phases, too.
    """

    def __init__(self, *others: Watch) -> None:
        self.others = others

    @property
    def wants_spans(self) -> bool:
        """Whether the times of single pieces are worth taking."""
        return any(other.wants_spans for other in self.others)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """A block that is one phase of the work."""
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
    """Of the thread that asks, as reports name it."""
    return threading.current_thread().name
