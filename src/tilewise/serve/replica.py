"""One copy of a model with the thread that owns it. An engine has one or several; requests say nothing of which."""

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
    """A loaded model at work. Ends its thread when it is dropped; nothing waits for that.

    Args:
        model: loaded; its owner from now on is the thread.

    Raises:
        ConfigError, CheckpointError, ResourceError: of the draft model that its settings name.
        ResourceError: the system has no more threads.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.commands: SimpleQueue[Command] = SimpleQueue()
        settings = model.settings
        output = "logits" if settings.runner == "generate" else "hidden"
        self._runner = Runner(model.instance, model.limits, output)
        guessing, self._draft_model = settings.speculation, None
        if guessing is not None and guessing.model is not None:
            try:
                self._draft_model = DraftModel(guessing.model, model, guessing.num_speculative_tokens)
            except BaseException:
                model.close()
                raise
        self._core = EngineCore(self._runner, model.limits, model.tokenizer, guessing, self._draft_model)
        try:
            self._thread = start_thread(Loop(self._core, self.commands), self.commands)
        except BaseException:
            self.free()
            raise
        weakref.finalize(self, self.commands.put, Close()).atexit = False

    @property
    def load(self) -> int:
        """About how many requests it has, those on their way to it included."""
        return self._core.num_requests + self.commands.qsize()

    @property
    def scheduler(self) -> Scheduler:
        """What runs and waits; numbers of it may be read from any thread."""
        return self._core.scheduler

    @property
    def steps(self) -> tuple[StepTimes, ...]:
        """The last calls of the model, oldest first; for any thread."""
        return self._runner.steps

    def close(self) -> None:
        """End all requests with an error, stop the devices and free their memory, when the step at hand is done."""
        self.commands.put(Close())
        self._thread.wait()
        self.free()

    def free(self) -> None:
        """Stop the devices and free their memory; the thread has ended, or is another process's."""
        self._runner.close()
        self.model.close()
        if self._draft_model is not None:
            self._draft_model.close()
