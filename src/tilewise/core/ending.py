"""`EndingThread`: a thread that says itself that it has ended, so that waiting for that is certain.

In Python 3.11 a `join` that Ctrl-C interrupts takes its thread for ended, so that the next one returns while it runs
on; and a thread whose start was interrupted may have begun or not. What such a thread uses must stay until its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["EndingThread"]

_PATIENCE_S = 0.1


class EndingThread(threading.Thread):
    """A thread that never holds up the end of the process.

    Args:
        target: what it does.
        args: of that.
        name: of the thread.
    """

    def __init__(
        self, target: Callable[..., object], args: tuple[Any, ...] = (), name: str | None = None
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Do the work, then say that it has ended."""
        try:
            super().run()
        finally:
            self._has_ended.set()

    def await_briefly(self) -> bool:
        """Whether it has ended after a while at most; a thread that has not begun by then never does."""
        return self._has_ended.wait(_PATIENCE_S) or self.ident is None

    def await_end(self) -> None:
        """Wait until it has ended, or is known never to begin. Ctrl-C interrupts that; asked again, it waits again.

        Raises:
            RuntimeError: the thread itself asks, as of `join`.
        """
        if threading.current_thread() is self:
            raise RuntimeError("a thread cannot wait for its own end")
        while not self.await_briefly():
            pass
