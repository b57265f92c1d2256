"""`WorkerPool`: worker processes that compute functions of plain data.

Python runs one thread at a time, so Python code gains from a second core only in another process.
Workers are started with `spawn`, because `fork` would copy locks that other threads hold. Functions
and data travel as pickles through pipes between a process and the workers that it started. No
pickle is read from a file.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from tilewise.core.errors import ResourceError
from tilewise.core.limits import num_cores
from tilewise.core.validation import Validator

__all__ = ["ENOUGH", "WorkerPool"]

Result = TypeVar("Result")
ENOUGH = 16
"""The number of calls that is worth starting processes for."""
MAX_WORKERS = 256
_CHUNKS_PER_WORKER = 8
_validate = Validator("processes")
_starting = threading.Lock()


class _Worker(SpawnProcess):
    """A worker process. It does not import the main module, so a script needs no `if __name__ ==
    "__main__"`.
    """

    def start(self) -> None:
        with _starting:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # `spawn` would import the file of the real one
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main

    def run(self) -> None:
        gc.disable()  # as in the parent while it plans: collections took longer than the work
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        super().run()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Context(SpawnContext):
    Process = _Worker


def _apply(function: Callable[..., Result], call: Sequence[Any]) -> Result:
    return function(*call)


class WorkerPool:
    """Worker processes for planning. Use the pool with `with`. The processes start at the first
    use. Several threads may use one pool.

    With `count=1`, and inside a worker, the calling process does the work itself.

    Args:
        count: number of worker processes; by default the number of cores that this process may use.

    Raises:
        ConfigError: `count` is not between 1 and 256.
    """

    def __init__(self, count: int | None = None) -> None:
        num_workers = min(num_cores(), MAX_WORKERS) if count is None else count
        self.count = _validate.integer("WorkerPool", "count", num_workers, 1, MAX_WORKERS)
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._is_closed = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def map(self, function: Callable[..., Result], calls: Iterable[Sequence[Any]]) -> Iterator[Result]:
        """Have workers compute `function(*call)` for all calls. The work begins at once, not when
        results are read.

        Args:
            function: a function of a module; arguments and results can be pickled.
            calls: the arguments of each call.

        Returns:
            The results in the order of the calls, each as soon as it is available. The iterator
            raises the error of the first call that fails, and ResourceError if a worker has died.

        Raises:
            ResourceError: the pool is closed.

        Examples:
            >>> from math import factorial
            >>> with WorkerPool(1) as pool:
            ...     list(pool.map(factorial, [(3,), (4,)]))
            [6, 24]
        """
        arguments = [*calls]
        with self._lock:
            if self._is_closed:
                raise ResourceError(
                    "[processes.WorkerPool] a pool must be open; got a closed one; create a new one"
                )
            if self.count == 1 or isinstance(multiprocessing.current_process(), _Worker):
                return starmap(function, arguments)
            executor = self._executor = self._executor or ProcessPoolExecutor(self.count, _Context())
        size = max(1, len(arguments) // (self.count * _CHUNKS_PER_WORKER))
        with self._death_reported(executor, function):
            results = executor.map(partial(_apply, function), arguments, chunksize=size)
        return self._in_order(results, executor, function)

    def close(self) -> None:
        """End the workers. Calls that have not begun are dropped."""
        with self._lock:
            executor, self._executor, self._is_closed = self._executor, None, True
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def _in_order(
        self, results: Iterator[Result], executor: ProcessPoolExecutor, function: Callable[..., Result]
    ) -> Iterator[Result]:
        with self._death_reported(executor, function):
            yield from results

    @contextmanager
    def _death_reported(
        self, executor: ProcessPoolExecutor, function: Callable[..., object]
    ) -> Iterator[None]:
        """A block that turns the death of a worker into a ResourceError, and lets the next call
        start new workers.
        """
        try:
            yield
        except BrokenProcessPool as error:
            with self._lock:
                if self._executor is executor:
                    self._executor = None
            name = getattr(function, "__qualname__", function)
            raise ResourceError(
                "[processes.WorkerPool] worker processes must live as long as their pool; got the end of one in a "
                f"call of {name}; read what it printed, and check whether memory is short"
            ) from error
