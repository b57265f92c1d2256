"""`WorkerPool`: this process and others next to it, which compute functions of plain data.

Python runs one thread's code at a time, so work in Python needs processes to gain from a second core. These are
started by file and know nothing of the main module, so that a script without `if __name__ == "__main__"` is not run
again, and no lock or thread of this process is copied, as `fork` would. Functions and data travel as pickles through
pipes between a parent and the children that it started itself; none is ever read from a file.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, Generic, TypeVar

from tilewise.core.errors import ResourceError
from tilewise.core.limits import num_cores
from tilewise.core.threads import BackgroundThread
from tilewise.core.validation import Validator
from tilewise.core.worker_link import WorkerLink

__all__ = ["ENOUGH", "Shared", "WorkerPool", "is_portable"]

Result = TypeVar("Result")
ENOUGH = 16
"""Pieces of work that are worth starting processes for."""
MAX_WORKERS = 256
_PART = 8  # of what is left, one part of so many per worker is the next batch: large at first, single calls at the end
_AHEAD = 2  # batches that a worker has been asked for
_validate = Validator("core")


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
    """Workers that compute functions: this process, and others next to it; use with `with`.

    The others start at the first call, all at once; until they are ready, this one works alone. It also does while a
    module is being imported: others would import it too, and threads here would wait for its end. A pool may be used by
    several threads, one call after the other.

    Objects of classes that are `core.kept.keep` are sent to a worker once: it has them until they die here, or until
    `forget`.

    Args:
        count: workers, this process among them; by default as many as it may use cores.

    Raises:
        ConfigError: not between 1 and 256.
    """

    def __init__(self, count: int | None = None) -> None:
        cores = num_cores()
        num_workers = min(cores, MAX_WORKERS) if count is None else count
        self.count = _validate.integer("WorkerPool", "count", num_workers, 1, MAX_WORKERS)
        self._links: list[WorkerLink] = []
        self._lock = threading.Lock()
        self._user: int | None = None  # the thread that is in a call
        self._closed = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the other processes now, so that they are ready at the first call; `map` does it by itself."""
        with self._alone():
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
        about: Sequence[object] | None = None,
    ) -> Iterator[Shared[Result]]:
        """As `map`, for a process that has something else to do while the others begin. Without `finish`, what was
        begun is given up.

        Args:
            function: as for `map`.
            calls: as for `map`.
            on_done: as for `map`.
            about: of each call, an object among its arguments; a worker that keeps it takes the call before others.

        Examples:
            >>> from math import factorial
            >>> with WorkerPool(1) as pool, pool.begin(factorial, [(3,), (4,)]) as shared:
            ...     meanwhile = factorial(5)
            ...     shared.finish()
            [6, 24]
        """
        given = [tuple(call) for call in calls]
        shared: Shared[Result] | None = None
        with self._alone():
            try:
                if given and not _is_importing():
                    self._start()
                self._require_open()
                shared = Shared(function, given, [] if _is_importing() else self._links, on_done, about)
                shared.start()
                yield shared
            finally:
                if shared is None or not shared.is_done:
                    self._end(shared)  # a worker may be in the middle of an answer that is wanted no more

    def forget(self) -> None:
        """Have the workers keep nothing that they were sent or have made."""
        with self._alone():
            for link in self._links:
                if link.far.forget():
                    link.send(pickle.dumps((None, None)))  # one that has ended is found at the next call

    def close(self) -> None:
        """End the processes."""
        with self._alone():
            self._closed = True
            self._end()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time. A thread that is in one already would wait for itself."""
        if self._user == threading.get_ident():
            raise ResourceError(
                "[core.WorkerPool] a pool's calls stand one behind the other; got one inside another; use a second pool"
            )
        with self._lock:
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = None

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceError("[core.WorkerPool] a pool must be open; got a closed one; make another")

    def _start(self) -> None:
        self._require_open()
        while len(self._links) < self.count - 1:
            self._links.append(WorkerLink())

    def _end(self, shared: Shared[Any] | None = None) -> None:
        """End the processes; threads that use them first, so that no other file gets a number that they still use."""
        for link in self._links:
            link.kill()
        if shared is not None:
            shared.give_up()
        for link in self._links:
            link.close()
        self._links.clear()


class Shared(Generic[Result]):
    """Calls that workers share. Threads of this process feed the others; `finish` works on what is left itself.

    Args:
        function: that is called.
        calls: its arguments.
        links: the other workers.
        on_done: called with the number of calls that have been answered since the last time.
        about: of each call, the object that a worker may keep.

    Attributes:
        is_done: whether all have been answered.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        calls: list[tuple[Any, ...]],
        links: Sequence[WorkerLink],
        on_done: Callable[[int], None] | None,
        about: Sequence[object] | None = None,
    ) -> None:
        self.function, self._calls, self._on_done, self._links = function, calls, on_done, links
        self._turns = _Turns(_homes(links, about, len(calls)), len(links))
        self._results: dict[int, Result] = {}
        self._failures: dict[int, BaseException] = {}
        self._feeders: list[BackgroundThread] = []
        self._news = threading.Event()  # results, a failure, or the end of a feeder
        self.is_done = not calls

    def start(self) -> None:
        """Have others begin."""
        for number, link in enumerate(self._links if self._calls else ()):
            feeder = BackgroundThread(self._serve, (number, link), stop=link.kill)
            self._feeders.append(feeder)
            feeder.start()

    def finish(self) -> list[Result]:
        """Work with the others until all is done; the results, in order of the calls.

        Raises:
            Exception: as `WorkerPool.map`.
        """
        return list(self.in_order())

    def in_order(self) -> Iterator[Result]:
        """The same one by one: what is done with a result is done while others work on the next ones.

        Raises:
            Exception: as `WorkerPool.map`.
        """
        for number in range(len(self._calls)):
            while number not in self._results and not self._failures:
                self._news.clear()  # what comes from now on is heard of below
                if not self._try(self._work_once) and number not in self._results and not self._failures:
                    self._news.wait()  # all that is left is with others
            if self._failures:
                break
            yield self._results[number]
        for feeder in self._feeders:
            feeder.wait()
        if self._failures:
            raise self._failures[min(self._failures)]
        self.is_done = True

    def give_up(self) -> None:
        """Begin nothing more; the workers have ended."""
        self._failures.setdefault(len(self._calls), ResourceError("[core.WorkerPool] calls were given up"))
        for feeder in self._feeders:
            feeder.wait()

    def _try(self, work: Callable[..., bool], *of: Any) -> bool:
        """What goes wrong besides calls is a failure behind those of all calls that have begun."""
        try:
            return work(*of)
        except BaseException as error:
            self._failures.setdefault(len(self._calls), error)
            return False

    def _take(self, worker: int | None) -> list[int]:
        """The numbers of the next few calls; none where there are none, or one has failed."""
        return [] if self._failures else self._turns.take(worker)

    def _done(self, numbers: Sequence[int], results: Sequence[Result]) -> None:
        self._results.update(zip(numbers, results))
        self._news.set()
        if self._on_done is not None:
            self._on_done(len(results))

    def _work_once(self) -> bool:
        """Compute one call here; whether there was one."""
        for number in self._take(None):
            try:
                result = self.function(*self._calls[number])
            except Exception as error:
                self._failures[number] = error
            else:
                self._done([number], [result])
            return True
        return False

    def _serve(self, worker: int, link: WorkerLink) -> None:
        self._try(self._feed, worker, link)
        self._news.set()

    def _feed(self, worker: int, link: WorkerLink) -> bool:
        """Have one worker compute, a few calls at a time. It is asked for the next before it has answered, so that it
        never waits for this process to read."""
        asked: deque[list[int]] = deque()
        while True:
            while len(asked) < _AHEAD and (batch := self._take(worker)):
                self._ask(link, batch)
                asked.append(batch)
            if not asked:
                return True
            reply = self._answer(link)
            batch = asked.popleft()
            if after := self._take(worker):
                self._ask(link, after)
                asked.append(after)
            failure, results = link.far.loads(reply)
            if failure is not None:
                self._failures[batch[failure[0]]] = failure[1]
                return False
            self._done(batch, results)

    def _ask(self, link: WorkerLink, batch: Sequence[int]) -> None:
        message = link.far.dumps((self.function, [self._calls[number] for number in batch]))
        link.send(pickle.dumps((link.far.dead(), message)))  # of one that has ended there will be no answer

    def _answer(self, link: WorkerLink) -> bytes:
        reply = link.receive()
        if reply is None:
            raise ResourceError(
                f"[core.WorkerPool] workers must live as long as their pool; got the end of process {link.process.pid} "
                f"({link.ending()}) in a call of {getattr(self.function, '__qualname__', self.function)}; see what "
                "it printed, and whether memory is short"
            )
        return reply


class _Turns:
    """Which call is whose: a worker takes first those that are about what it keeps, then those about nothing that
    is kept, then what others would have taken last. Several threads take from it.

    Args:
        homes: per call, the number of the worker that keeps what it is about; None for no worker.
        others: workers besides this process.
    """

    def __init__(self, homes: Iterable[int | None], others: int) -> None:
        self._lists: dict[int | None, deque[int]] = {worker: deque() for worker in (None, *range(others))}
        for number, home in enumerate(homes):
            self._lists[home].append(number)
        self._part = _PART * (others + 1)
        self._lock = threading.Lock()

    def take(self, worker: int | None) -> list[int]:
        """The next batch of a worker: one part of so many of what is left. So workers end together, though one call
        takes longer than another, and messages are few. This process, None, needs no messages: one call at a time."""
        with self._lock:
            size = 1 if worker is None else -(-sum(map(len, self._lists.values())) // self._part)
            for first in (worker, None):
                if left := self._lists[first]:
                    return [left.popleft() for _ in range(min(size, len(left)))]
            longest = max(self._lists.values(), key=len)
            return [longest.pop() for _ in range(min(size, len(longest)))][::-1]


def _homes(links: Sequence[WorkerLink], about: Sequence[object] | None, count: int) -> Iterator[int | None]:
    for number in range(count):
        thing = None if about is None else about[number]
        yield next((i for i, link in enumerate(links) if thing is not None and link.far.has(thing)), None)


def _is_importing() -> bool:
    """Whether a module is in the middle of its import. The lock of a module is held until then: a thread that writes
    or reads a pickle of what is in it would wait for the thread that imports, which waits for its calls."""
    modules = [module for module in sys.modules.copy().values() if type(module) is ModuleType]
    return any(getattr(vars(module).get("__spec__"), "_initializing", False) for module in modules)
