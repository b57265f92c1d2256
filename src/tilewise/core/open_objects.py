"""The open objects of this process that hold threads, memory or processes: models, groups of
devices, task runtimes, engines, process groups. `tilewise.shutdown` closes them.

An object notes itself when it is complete, and is forgotten when it is dropped. A forked child has
none of its parent's threads, so it begins without open objects.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Protocol

__all__ = ["close_all", "note_open"]


class _Closable(Protocol):
    def close(self) -> None:
        """Free everything; does nothing if it is already closed."""


_numbers = itertools.count()
_open: weakref.WeakValueDictionary[int, _Closable] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def note_open(thing: _Closable) -> None:
    """Remember an object, to close it in `close_all` if the program has not done so."""
    with _lock:
        _open[next(_numbers)] = thing


def close_all() -> None:
    """Close all open objects, the newest first, because later ones may use earlier ones.

    Raises:
        Exception: the first one that a `close` raised. All other objects are closed. An object
            whose `close` failed is tried again by the next call.
    """
    first: Exception | None = None
    with _lock:
        things = sorted(_open.items(), reverse=True)
    for number, thing in things:
        try:
            thing.close()
        except Exception as error:
            first = first or error
            continue
        with _lock:
            _open.pop(number, None)
    if first is not None:
        raise first


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it while the process was forked
    _open.clear()


os.register_at_fork(after_in_child=_forget)
