"""Runs the work on the files of several devices (hashing, reading, writing) concurrently, with one
thread per core.

Unlike `concurrent.futures`, this module drops queued work when the process ends, because an
incomplete checkpoint is then abandoned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from tilewise.core.limits import num_cores
from tilewise.processes.threads import BackgroundThread

__all__ = ["EXIT_PATIENCE_S", "run_concurrently"]

EXIT_PATIENCE_S = 2.0
"""How long the end of a program waits for a thread that reads or writes a file."""


def run_concurrently(work: Sequence[Callable[[], object]]) -> None:
    """Run all pieces of work on at most one thread per core, and return when all are done. If the
    system provides fewer threads, these do all the work. If it provides no thread, the caller's
    thread does all the work.

    Raises:
        BaseException: the exception of the first piece that failed. Pieces that have not started
            are dropped.
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
            except (
                RuntimeError
            ):  # the system provides no more threads: the started ones do the work, or this one
                break
            started.append(thread)
        if not started:
            crew.work()
        for thread in started:
            thread.wait()
    finally:  # after an interrupt, no further work starts
        crew.stop()
    if crew.error is not None:
        raise crew.error


class _Crew:
    """State that the threads share: the remaining work, and the first exception."""

    def __init__(self, work: Sequence[Callable[[], object]]) -> None:
        self._remaining: Iterator[Callable[[], object]] = iter(work)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            return next(self._remaining, None)

    def stop(self) -> None:
        """Drop the work that has not started."""
        with self._lock:
            self._remaining = iter(())

    def work(self) -> None:
        """The function of one thread."""
        try:
            while (piece := self._next()) is not None:
                piece()
        except BaseException as error:  # the caller's thread raises it
            with self._lock:
                if self.error is None:
                    self.error = error
            self.stop()
