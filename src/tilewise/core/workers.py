"""`WorkerPool`: this process and others beside it, which compute functions of plain data.

Python runs one thread's code at a time, so work in Python needs processes to gain from a second core. These are
started by file and know nothing of the main module, so that a script without `if __name__ == "__main__"` is not run
again, and no lock or thread of this process is copied, as `fork` would. Functions and data travel as pickles through
pipes between a parent and the children that it started itself; none is ever read from a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

from tilewise.core import worker_child
from tilewise.core.border import Border
from tilewise.core.errors import ResourceError

__all__ = ["ENOUGH", "WorkerPool", "is_portable"]

Result = TypeVar("Result")
ENOUGH = 16
"""Pieces of work that are worth starting processes for."""
MAX_WORKERS = 256
_BATCHES_PER_WORKER = 8  # so that workers end together, though one call takes longer than another
_border = Border("core")


def _find(module: str, qualname: str) -> Any:
    """What stands in a module under a name, `Class.method` or `function`."""
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def is_portable(function: object) -> bool:
    """Whether another process finds the same function by its name: no lambda, nothing inside a function, nothing of the
    main module, which no worker imports."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or module == "__main__":
        return False
    try:
        return "<" not in qualname and _find(module, qualname) is function
    except (ImportError, AttributeError):
        return False


class WorkerPool:
    """Workers that compute functions: this process, and others beside it; use with `with`.

    The others start at the first call, all at once; until they are ready, this one works alone. A pool may be used by
    several threads, one call after the other.

    Args:
        count: workers, this process among them; by default as many as it may use cores.

    Raises:
        ConfigError: not between 1 and 256.
    """

    def __init__(self, count: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        given = min(cores, MAX_WORKERS) if count is None else count
        self.count = _border.integer("WorkerPool", "count", given, 1, MAX_WORKERS)
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the other processes now, so that they are ready at the first call; `map` does it by itself."""
        with self._lock:
            self._start()

    def map(
        self,
        function: Callable[..., Result],
        calls: Iterable[Sequence[Any]],
        on_done: Callable[[int], None] | None = None,
    ) -> list[Result]:
        """`[function(*call) for call in calls]`, computed by the workers, part of it here.

        Args:
            function: a function that `is_portable`, of data that can be pickled.
            calls: its arguments.
            on_done: called with the number of calls that have been answered since the last time.

        Returns:
            The results, in order.

        Raises:
            Exception: what the first of the calls that failed has raised.
            ResourceError: a worker has died, or the pool is closed.
        """
        given = [tuple(call) for call in calls]
        if not given:
            return []
        with self._lock:
            self._start()
            try:
                return self._share(function, given, on_done)
            except BaseException:
                self._end()  # a worker may be in the middle of an answer that is wanted no more
                raise

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        if self._closed:
            raise ResourceError("[core.WorkerPool] a pool must be open; got a closed one; make another")
        while len(self._children) < self.count - 1:
            child = subprocess.Popen(
                [sys.executable, "-I", worker_child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process, which ends them
            )
            self._children.append(child)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # that it is dead is found at the first call
                child.stdin.write(json.dumps(sys.path).encode() + b"\n")
                child.stdin.flush()

    def _end(self) -> None:
        for child in self._children:
            assert child.stdin is not None and child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.kill()
            child.wait()
            child.stdout.close()
        self._children.clear()

    def _share(
        self,
        function: Callable[..., Result],
        calls: list[tuple[Any, ...]],
        on_done: Callable[[int], None] | None,
    ) -> list[Result]:
        size = -(-len(calls) // (_BATCHES_PER_WORKER * self.count))
        batches: queue.SimpleQueue[int] = queue.SimpleQueue()
        for first in range(0, len(calls), size):
            batches.put(first)
        results: dict[int, list[Result]] = {}
        failures: dict[int, BaseException] = {}

        def work(child: subprocess.Popen[bytes] | None) -> None:
            while not failures:
                try:
                    first = batches.get_nowait()
                except queue.Empty:
                    return
                part = calls[first : first + size]
                try:
                    if child is None:
                        results[first] = _compute(function, part, first, failures)
                    else:
                        results[first] = _ask(child, function, part, first, failures)
                except BaseException as error:
                    failures[first] = error
                    return
                if on_done is not None:
                    on_done(len(part))

        feeders = [threading.Thread(target=work, args=(child,), daemon=True) for child in self._children]
        for feeder in feeders:
            feeder.start()
        work(None)
        for feeder in feeders:
            feeder.join()
        if failures:
            raise failures[min(failures)]
        return [result for first in sorted(results) for result in results[first]]


def _compute(
    function: Callable[..., Result],
    calls: list[tuple[Any, ...]],
    first: int,
    failures: dict[int, BaseException],
) -> list[Result]:
    """Compute a few calls here; what one of them raises is a failure under its number."""
    results: list[Result] = []
    for call in calls:
        try:
            results.append(function(*call))
        except Exception as error:
            failures[first + len(results)] = error
            break
    return results


def _ask(
    child: subprocess.Popen[bytes],
    function: Callable[..., Result],
    calls: list[tuple[Any, ...]],
    first: int,
    failures: dict[int, BaseException],
) -> list[Result]:
    """Have one worker compute a few calls; what one of them raises is a failure under its number."""
    assert child.stdin is not None and child.stdout is not None
    body = pickle.dumps((function, calls), pickle.HIGHEST_PROTOCOL)
    try:
        worker_child.write_frame(child.stdin, body)
        reply = worker_child.read_frame(child.stdout)
    except BrokenPipeError:
        reply = None
    if reply is None:
        raise ResourceError(
            f"[core.WorkerPool] workers must live as long as their pool; got the end of process {child.pid} "
            f"({_ending(child)}) in a call of {getattr(function, '__qualname__', function)}; see what it printed, and "
            "whether memory is short"
        )
    failure, results = pickle.loads(reply)
    if failure is not None:
        failures[first + failure[0]] = failure[1]
        return []
    return list(results)


def _ending(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "it has closed its pipe"
    return f"signal {-code}" if code < 0 else f"exit status {code}"
