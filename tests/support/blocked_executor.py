"""An executor for tests of calls that wait for a run."""

from __future__ import annotations

import threading


class BlockedExecutor:
    """An executor whose runs wait until they are released."""

    def __init__(self, executor):
        self.executor = executor
        self.entered, self.leave = threading.Event(), threading.Event()

    def run(self, *arguments):
        self.entered.set()
        assert self.leave.wait(60)
        self.executor.run(*arguments)

    def __getattr__(self, name):
        return getattr(self.executor, name)
