"""`BackgroundThread`: the one kind of thread that works next to the caller without being joined in the same function.

The interpreter must not end while a thread is inside native code. Up to Python 3.13 such a thread
is unwound when it asks for the interpreter's lock again, which aborts the process in C++ and Rust.
So each thread is registered with `atexit`: when the program ends, the thread is asked to stop, and
joined. Python would join a non-daemon thread too, but would never ask it to stop.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["BackgroundThread"]

_POLL_S = 0.1


class BackgroundThread(threading.Thread):
    """A thread that is asked to stop, and joined, when the program ends at the latest.

    Args:
        target: the function to run.
        args: its arguments.
        name: name of the thread.
        stop: asks `target` to return soon. Called at the end of the program, from another thread.
        patience_s: maximum time that the end of the program waits for the thread. It may be finite
            only if `target` waits for files or other processes, never if it runs native code of
            Tilewise.
    """

    def __init__(
        self,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str | None = None,
        *,
        stop: Callable[[], object],
        patience_s: float = math.inf,
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._stop_target, self._patience_s = stop, patience_s
        self._process = os.getpid()
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system has no more threads.
        """
        atexit.register(self.stop)
        try:
            super().start()
        except RuntimeError:
            atexit.unregister(self.stop)
            raise
        except BaseException:  # after Ctrl-C the thread may have started
            self.stop()
            raise

    def run(self) -> None:
        """Run the target."""
        try:
            super().run()
        finally:
            atexit.unregister(self.stop)
            self._has_ended.set()

    def stop(self) -> None:
        """Ask the target to return, and wait until it has, or until `patience_s` is over. Does
        nothing in a forked child, which does not have the thread.
        """
        if os.getpid() == self._process:
            self._stop_target()
            until = time.monotonic() + self._patience_s
            while not self.wait_briefly() and time.monotonic() < until:
                pass
        atexit.unregister(self.stop)

    def wait_briefly(self) -> bool:
        """Wait at most a tenth of a second. Returns whether the thread has ended, or was never
        started.
        """
        return self._has_ended.wait(_POLL_S) or self.ident is None

    def wait(self) -> None:
        """Wait until the thread has ended. If Ctrl-C interrupts the call, it can be called again.
        This is not true of `join`: in Python 3.11 an interrupted `join` treats the thread as ended.

        Raises:
            RuntimeError: the thread itself called this method.
        """
        if threading.current_thread() is self:
            raise RuntimeError("a thread cannot wait for its own end")
        while not self.wait_briefly():
            pass
