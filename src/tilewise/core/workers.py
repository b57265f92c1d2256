"""`WorkerPool`: this process and others beside it, which compute functions of plain data.

Python runs one thread's code at a time, so work in Python needs processes to gain from a second core. These are
started by file and know nothing of the main module, so that a script without `if __name__ == "__main__"` is not run
again, and no lock or thread of this process is copied, as `fork` would. Functions and data travel as pickles through
pipes between a parent and the children that it started itself; none is ever read from a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from tilewise.core import worker_child
from tilewise.core.border import Border
from tilewise.core.errors import ResourceError

__all__ = ["ENOUGH", "Shared", "WorkerPool", "is_portable"]

Result = TypeVar("Result")
ENOUGH = 16
"""Pieces of work that are worth starting processes for."""
MAX_WORKERS = 256
_PART = 8  # of what is left, one part of so many per worker is the next batch: large at first, single calls at the end
_AHEAD = 2  # batches that a worker has been asked for
_PIPE_BYTES = 1 << 20  # what Linux gives every user
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
        with self.begin(function, calls, on_done) as shared:
            return shared.finish()

    @contextlib.contextmanager
    def begin(
        self,
        function: Callable[..., Result],
        calls: Iterable[Sequence[Any]],
        on_done: Callable[[int], None] | None = None,
    ) -> Iterator[Shared[Result]]:
        """As `map`, for a process that has something else to do while the others begin. Without `finish`, what was
        begun is given up.

        Examples:
            >>> from math import factorial
            >>> with WorkerPool(1) as pool, pool.begin(factorial, [(3,), (4,)]) as shared:
            ...     meanwhile = factorial(5)
            ...     shared.finish()
            [6, 24]
        """
        given = [tuple(call) for call in calls]
        is_done = False
        with self._lock:
            if given:
                self._start()
            try:
                shared = Shared(function, given, self.count, on_done)
                shared.start(self._children)
                yield shared
                is_done = shared.is_done
            finally:
                if not is_done:
                    self._end()  # a worker may be in the middle of an answer that is wanted no more

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
            assert child.stdin is not None and child.stdout is not None
            for pipe in (child.stdin, child.stdout):
                _widen(pipe)
            with contextlib.suppress(BrokenPipeError):  # that it is dead is found at the first call
                child.stdin.write(json.dumps(sys.path).encode() + b"\n")
                child.stdin.flush()

    def _end(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            assert child.stdin is not None and child.stdout is not None
            child.wait()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.stdout.close()
        self._children.clear()


class Shared(Generic[Result]):
    """Calls that workers share. Threads of this process feed the others; `finish` works on what is left itself.

    Args:
        function: that is called.
        calls: its arguments.
        count: workers.
        on_done: called with the number of calls that have been answered since the last time.

    Attributes:
        is_done: whether all have been answered.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        calls: list[tuple[Any, ...]],
        count: int,
        on_done: Callable[[int], None] | None,
    ) -> None:
        self.function, self._calls, self._on_done = function, calls, on_done
        self._batches = iter(
            _batches(len(calls), _PART * count)
        )  # of a list, whose step is one turn: threads share it
        self._results: dict[int, list[Result]] = {}
        self._failures: dict[int, BaseException] = {}
        self._feeders: list[threading.Thread] = []
        self.is_done = not calls

    def start(self, children: Iterable[subprocess.Popen[bytes]]) -> None:
        """Have others begin."""
        if not self._calls:
            return
        self._feeders = [
            threading.Thread(target=self._try, args=(self._feed, child), daemon=True) for child in children
        ]
        for feeder in self._feeders:
            feeder.start()

    def finish(self) -> list[Result]:
        """Work with the others until all is done; the results, in order of the calls.

        Raises:
            Exception: as `WorkerPool.map`.
        """
        self._try(self._work)
        for feeder in self._feeders:
            feeder.join()
        if self._failures:
            raise self._failures[min(self._failures)]
        self.is_done = True
        return [result for first in sorted(self._results) for result in self._results[first]]

    def _try(self, work: Callable[..., None], *of: Any) -> None:
        """What goes wrong besides calls is a failure behind those of all calls that have begun."""
        try:
            work(*of)
        except BaseException as error:
            self._failures[len(self._calls)] = error

    def _take(self) -> range | None:
        """The numbers of the next few calls; None where there are none, or one has failed."""
        return None if self._failures else next(self._batches, None)

    def _done(self, first: int, results: list[Result]) -> None:
        self._results[first] = results
        if self._on_done is not None:
            self._on_done(len(results))

    def _work(self) -> None:
        """Compute here, a few calls at a time."""
        while (batch := self._take()) is not None:
            results: list[Result] = []
            for number in batch:
                try:
                    results.append(self.function(*self._calls[number]))
                except Exception as error:
                    self._failures[number] = error
                    return
            self._done(batch.start, results)

    def _feed(self, child: subprocess.Popen[bytes]) -> None:
        """Have one worker compute, a few calls at a time. It is asked for the next before it has answered, so that it
        never waits for this process to read."""
        asked: deque[range] = deque()
        while True:
            while len(asked) < _AHEAD and (batch := self._take()) is not None:
                self._ask(child, batch)
                asked.append(batch)
            if not asked:
                return
            reply = self._answer(child)
            batch = asked.popleft()
            if (after := self._take()) is not None:
                self._ask(child, after)
                asked.append(after)
            failure, results = pickle.loads(reply)
            if failure is not None:
                self._failures[batch.start + failure[0]] = failure[1]
                return
            self._done(batch.start, results)

    def _ask(self, child: subprocess.Popen[bytes], batch: range) -> None:
        assert child.stdin is not None
        part = self._calls[batch.start : batch.stop]
        body = pickle.dumps((self.function, part), pickle.HIGHEST_PROTOCOL)
        with contextlib.suppress(BrokenPipeError):  # there will be no answer
            worker_child.write_frame(child.stdin, body)

    def _answer(self, child: subprocess.Popen[bytes]) -> bytes:
        assert child.stdout is not None
        reply = worker_child.read_frame(child.stdout)
        if reply is None:
            raise ResourceError(
                f"[core.WorkerPool] workers must live as long as their pool; got the end of process {child.pid} "
                f"({_ending(child)}) in a call of {getattr(self.function, '__qualname__', self.function)}; see what "
                "it printed, and whether memory is short"
            )
        return reply


def _widen(pipe: IO[bytes]) -> None:
    """Let a pipe hold a whole batch, where the system can: a worker that writes an answer into a full one stands still
    until this process, busy with its own share, reads the next piece of it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # more than a user may have
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _batches(count: int, part: int) -> list[range]:
    """The numbers of calls in order, one part of so many of what is left at a time: so workers end together, though one
    call takes longer than another, and messages are few."""
    found, first = list[range](), 0
    while first < count:
        found.append(range(first, first + (-(-(count - first) // part))))
        first = found[-1].stop
    return found


def _ending(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "it has closed its pipe"
    return f"signal {-code}" if code < 0 else f"exit status {code}"
