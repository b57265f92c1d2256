"""One copy of a model with the thread that owns it. An engine has one or several copies. The output
of a request does not depend on which copy serves it.
"""

from __future__ import annotations

import weakref
from queue import SimpleQueue

from tilewise.serve.core import EngineCore
from tilewise.serve.draft_model import DraftModel
from tilewise.serve.loop import Close, Command, Loop, start_thread
from tilewise.serve.model import ServedModel
from tilewise.serve.outputs import StepTimes
from tilewise.serve.runner import Runner
from tilewise.serve.scheduler import Scheduler

__all__ = ["Replica"]


class Replica:
    """A loaded model and its thread. Garbage collection ends the thread without waiting for it.

    Args:
        model: the loaded model, which only the thread uses from now on.

    Raises:
        ConfigError, CheckpointError, ResourceError: the draft model of the settings cannot be loaded.
        ResourceError: the system cannot start another thread.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.commands: SimpleQueue[Command] = SimpleQueue()
        settings = model.settings
        output = "logits" if settings.runner == "generate" else "hidden"
        self._runner = Runner(model.instance, model.limits, output, has_adapters=bool(model.adapters))
        speculation, self._draft_model = settings.speculation, None
        if speculation is not None and speculation.model is not None:
            try:
                self._draft_model = DraftModel(speculation.model, model, speculation.num_speculative_tokens)
            except BaseException:
                model.close()
                raise
        self._core = EngineCore(self._runner, model.limits, model.tokenizer, speculation, self._draft_model)
        try:
            self._thread = start_thread(Loop(self._core, self.commands), self.commands)
        except BaseException:
            self.free()
            raise
        weakref.finalize(self, self.commands.put, Close()).atexit = False

    @property
    def load(self) -> int:
        """Approximate number of requests, including queued ones."""
        return self._core.num_requests + self.commands.qsize()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. Any thread may read its counters."""
        return self._core.scheduler

    @property
    def steps(self) -> tuple[StepTimes, ...]:
        """Times of the last model calls, oldest first. Any thread may read them."""
        return self._runner.steps

    def close(self) -> None:
        """After the current step, end all requests with an error, stop the devices and free their memory."""
        self.commands.put(Close())
        self._thread.wait()
        self.free()

    def free(self) -> None:
        """Stop the devices and free their memory. Call it only if the thread has ended or belongs
        to another process.
        """
        self._runner.close()
        self.model.close()
        if self._draft_model is not None:
            self._draft_model.close()
