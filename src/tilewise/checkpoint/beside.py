"""Work for several threads: hashing, reading and writing the files of devices beside one another.

The threads never hold up the end of the process, as those of `concurrent.futures` would: what a checkpoint's writer
has not finished then was never there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from tilewise.core.limits import num_cores

__all__ = ["do_beside"]


def do_beside(work: Sequence[Callable[[], object]]) -> None:
    """Do all of it, on as many threads as there are cores at most, each piece on one; returns when all is done.
    Where the system gives fewer threads, they do it; where it gives none, the caller's does.

    Raises:
        BaseException: what the first piece that failed raised; pieces that were not begun are left undone.
    """
    crew = _Crew(work)
    cores = num_cores()
    threads = [
        threading.Thread(target=crew.work, name=f"checkpoint {i}", daemon=True)
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
            thread.join()
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
