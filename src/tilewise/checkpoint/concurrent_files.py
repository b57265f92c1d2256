"""Hashes, reads and writes the files of several devices at a time, with one thread per core.

Unlike the threads of `concurrent.futures`, these drop queued work when the process ends, because a
checkpoint that is incomplete then is abandoned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from tilewise.core.limits import num_cores
from tilewise.core.threads import BackgroundThread

__all__ = ["EXIT_PATIENCE_S", "run_concurrently"]

EXIT_PATIENCE_S = 2.0
"""How long the end of a program waits for a thread that reads or writes a file."""


def run_concurrently(work: Sequence[Callable[[], object]]) -> None:
    """Do all of it, on as many threads as there are cores at most, each piece on one; returns when all is done.
    Where the system gives fewer threads, they do it; where it gives none, the caller's does.

    Raises:
        BaseException: what the first piece that failed raised; pieces that were not begun are left undone.
    """
    crew = _Crew(work)
    cores = num_cores()
    threads = [
        BackgroundThread(crew.work, name=f"checkpoint {i}", stop=crew.stop, patience_s=EXIT_PATIENCE_S)
        for i in range(min(cores, len(work)))
    ]
    started = []
    try:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:  # the system gives no more: those that are there do it, or this one
                break
            started.append(thread)
        if not started:
            crew.work()
        for thread in started:
            thread.wait()
    finally:  # an interrupt of the caller's: what is not begun is not
        crew.stop()
    if crew.error is not None:
        raise crew.error


class _Crew:
    """What threads share: the work that is left, and what went wrong."""

    def __init__(self, work: Sequence[Callable[[], object]]) -> None:
        self._left: Iterator[Callable[[], object]] = iter(work)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            return next(self._left, None)

    def stop(self) -> None:
        """Leave undone what is not begun."""
        with self._lock:
            self._left = iter(())

    def work(self) -> None:
        """One thread's life."""
        try:
            while (piece := self._next()) is not None:
                piece()
        except BaseException as error:  # whatever it is, the caller's thread raises it
            with self._lock:
                if self.error is None:
                    self.error = error
            self.stop()
