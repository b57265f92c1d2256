"""Objects that a worker keeps, so that it is sent each of them once: those it was sent, and those it made itself.

Two processes agree on numbers. What this one knows of a worker is a `Far`: the numbers of objects that live here and
that the worker has too. It holds no object: what dies here is forgotten there with the next message. In the worker,
`HERE` holds them. Only classes that say so (`keep`) are kept: their objects never change, and are a lot to send.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["HERE", "Far", "Near", "keep"]

Class = TypeVar("Class", bound=type)
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
_classes: list[type] = []
_reading = threading.local()  # from which worker this thread reads an answer


def keep(of: Class) -> Class:
    """Declare a class whose objects never change; its `__reduce__` gives a function and arguments."""
    _classes.append(of)
    return of


def _dumps(content: object, reduce: Callable[[Any], Reduced]) -> bytes:
    """A pickle in which kept classes are written as `reduce` says."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(_classes, reduce)}
    pickler.dump(content)
    return stream.getvalue()


class Far:
    """What one worker keeps, as the process that started it knows it. One thread at a time writes and reads."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[weakref.ref[Any], int]
        ] = {}  # by id, which another object may have later
        self._dead: deque[int] = deque()
        self._numbers = itertools.count(-1, -1)  # the worker's own count upwards

    def has(self, thing: object) -> bool:
        """Whether the worker keeps an object."""
        known = self._known.get(id(thing))
        return known is not None and known[0]() is thing

    def dumps(self, content: object) -> bytes:
        """A message to the worker; kept objects that it has are numbers in it."""
        return _dumps(content, self._reduce)

    def loads(self, body: bytes) -> Any:
        """An answer of the worker, which keeps what it has made."""
        _reading.far = self
        try:
            return pickle.loads(body)
        finally:
            del _reading.far

    def dead(self) -> list[int]:
        """Numbers of objects that have died here, each once."""
        found = []
        while self._dead:
            found.append(self._dead.popleft())
        return found

    def forget(self) -> bool:
        """Know of nothing any more, as the worker is then told to; whether there was anything."""
        had = bool(self._known or self._dead)
        self._known.clear()
        self._dead.clear()
        return had

    def note(self, thing: object, number: int) -> None:
        """The worker keeps an object under a number, until it dies here."""
        known, dead, key = self._known, self._dead, id(thing)

        def note_death(ref: weakref.ref[Any]) -> None:  # called by any thread, at any time
            dead.append(number)
            if (now := known.get(key)) is not None and now[0] is ref:
                known.pop(key, None)

        known[key] = weakref.ref(thing, note_death), number

    def _reduce(self, thing: Any) -> Reduced:
        if self.has(thing):
            return _kept, (self._known[id(thing)][1],)
        number = next(self._numbers)
        self.note(thing, number)
        return _keep, (number, *thing.__reduce__())


class Near:
    """What this worker keeps for the process that started it."""

    def __init__(self) -> None:
        self.things: dict[int, Any] = {}
        self._own: dict[int, int] = {}  # number by id
        self._numbers = itertools.count(1)

    def hold(self, thing: Any, number: int) -> None:
        """Keep an object."""
        self.things[number] = thing
        self._own[id(thing)] = number

    def drop(self, numbers: list[int] | None) -> None:
        """Keep some no more; with None, nothing."""
        for number in [*self.things] if numbers is None else numbers:
            del self._own[id(self.things.pop(number))]

    def dumps(self, content: object) -> bytes:
        """An answer; what it holds of kept classes is kept."""
        return _dumps(content, self._reduce)

    def _reduce(self, thing: Any) -> Reduced:
        make, arguments = thing.__reduce__()
        if id(thing) in self._own:  # the other process may have lost it meanwhile
            return make, arguments
        number = next(self._numbers)
        self.hold(thing, number)
        return _made, (number, make, arguments)


HERE = Near()
"""Of this process, where it is a worker."""


def _keep(number: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """In a worker: an object that it is sent."""
    thing = make(*arguments)
    HERE.hold(thing, number)
    return thing


def _kept(number: int) -> Any:
    """In a worker: an object that it has."""
    return HERE.things[number]


def _made(number: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """In the process that started the worker: an object that was made there."""
    thing = make(*arguments)
    _reading.far.note(thing, number)
    return thing
