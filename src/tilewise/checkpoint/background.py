"""Writes checkpoints in the background, one at a time.

A thread exists while there is something to write. The caller passes a state that does not change
any more (the copy that `GraphInstance.state_dict` returns) and continues. The thread writes the
checkpoint as `save_checkpoint` does. If it fails, the error is raised in the caller's thread when
the caller asks (`check`, `wait`) or passes the next checkpoint. A checkpoint that is incomplete
when the process ends is abandoned and leaves no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewise.checkpoint.concurrent_files import EXIT_PATIENCE_S
from tilewise.checkpoint.training import TrainingState, checkpoint_path, save_checkpoint
from tilewise.core import CheckpointError
from tilewise.core.validation import Validator
from tilewise.processes.threads import BackgroundThread

__all__ = ["CheckpointWriter"]

_validate = Validator("checkpoint", CheckpointError)


class _Abandoned(BaseException):
    """Ends the writing of an abandoned checkpoint."""


class CheckpointWriter:
    """Writes the checkpoints of one run. Only one thread may use it."""

    def __init__(self) -> None:
        self._thread: BackgroundThread | None = None
        self._error: BaseException | None = None
        self._is_given_up = False
        self._done = (0, 0)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(
        self, directory: str | Path, state: TrainingState, config: Mapping[str, Any], keep_last: int
    ) -> Path:
        """Wait until the previous checkpoint is written, then begin to write a new one.

        Args:
            directory: as for `save_checkpoint`.
            state: the state to write. The caller must not change it any more.
            config: as for `save_checkpoint`.
            keep_last: as for `save_checkpoint`.

        Returns:
            The future path of the checkpoint.

        Raises:
            ResourceError, CheckpointError: the previous checkpoint could not be written, or `state`
                is invalid.
        """
        _validate.instance("write", "a state", state, TrainingState, "pass TrainingState(step, tensors)")
        self.wait()
        self._is_given_up, self._done = False, (0, 0)
        path = checkpoint_path(directory, state.step)
        work = directory, state, config, keep_last
        self._thread = BackgroundThread(
            self._write, work, f"write {path.name}", stop=self._ask_to_stop, patience_s=EXIT_PATIENCE_S
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system provides no thread: write in this one; `wait` raises its error
            self._write(*work)
        return path

    def check(self) -> None:
        """Raise the error of the last checkpoint, once, if there was one. Does not wait.

        Raises:
            ResourceError, CheckpointError: the checkpoint could not be written. Older checkpoints
                are kept.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, on_progress: Callable[[int, int], object] | None = None) -> None:
        """Wait until the last checkpoint is written.

        Args:
            on_progress: called now and then with the number of bytes done and the number of all
                bytes.

        Raises:
            ResourceError, CheckpointError: as for `check`.
        """
        _validate.function("wait", "on_progress", on_progress)
        while self._thread is not None:
            is_over = self._thread.wait_briefly()
            if on_progress is not None:
                on_progress(*self._done)
            if is_over:
                self._thread = None
        self.check()

    def give_up(self) -> None:
        """Abandon the checkpoint that is being written. Returns when nothing is written any more."""
        self._ask_to_stop()
        if self._thread is not None:
            self._thread.wait()
            self._thread = None

    def _ask_to_stop(self) -> None:
        self._is_given_up = True

    def _write(
        self, directory: str | Path, state: TrainingState, config: Mapping[str, Any], keep_last: int
    ) -> None:
        try:
            save_checkpoint(directory, state, config, keep_last, self._progress)
        except _Abandoned:
            pass
        except BaseException as error:  # `check` raises it in the caller's thread
            self._error = error.with_traceback(None)  # the frames would keep the state in memory

    def _progress(self, done: int, total: int) -> None:
        self._done = done, total
        if self._is_given_up:
            raise _Abandoned
