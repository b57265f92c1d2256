"""Evaluation of a model in training on held-out windows, and what follows from it: the best model
and early stopping.

`every_window` has the batches of an evaluation: each window once, and the tokens after the last
whole one. `with_evaluation` is the state of early stopping as a pure function of the losses so far;
checkpoints have it, so a resumed run stops where an uninterrupted one does. `BestModels` keeps the
weights of the evaluations that a run may still need.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import (
    EvaluationRecord,
    checkpoint_paths,
    open_checkpoint,
    remove_directory,
    replace_directory,
)
from tilewise.core import CheckpointError
from tilewise.data import IGNORED, Batches, MaskedBatches, TextWindows

__all__ = ["BestModels", "every_window", "with_evaluation"]

_NAME = re.compile(r"step-([0-9]{8,18})")


def every_window(batches: Batches | MaskedBatches) -> Iterator[dict[str, NDArray[np.int32]]]:
    """Batches that have every window of some text once. Labels of windows that fill up the last
    batch are `IGNORED`.

    Packed text may end with tokens that fill no window. They follow as a last batch of one sequence.
    """
    for number in range(-(-batches.num_windows // batches.batch)):
        batch = batches.at(number)
        batch["labels"][batches.num_windows - number * batches.batch :] = IGNORED  # of the next epoch
        yield batch
    for source in batches.sources if isinstance(batches, Batches) else ():
        if not isinstance(source, TextWindows):
            continue
        rest = source.stream[len(source) * source.context :]
        if len(rest) > 1:
            shape = batches.batch, source.context
            tokens, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
            tokens[0, : len(rest) - 1], labels[0, : len(rest) - 1] = rest[:-1], rest[1:]
            yield {"tokens": tokens, "labels": labels}


def with_evaluation(
    record: EvaluationRecord | None, step: int, loss: float, threshold: float
) -> EvaluationRecord | None:
    """The record after one more evaluation, as transformers' `EarlyStoppingCallback` counts.

    Args:
        record: before the evaluation; None before the first one.
        step: number of optimizer steps done.
        loss: held-out loss; it may be NaN.
        threshold: how much lower than the lowest loss a loss must be for a gain.
    """
    if record is None:
        return EvaluationRecord(best_loss=loss, best_step=step) if np.isfinite(loss) else None
    has_gain = loss < record.best_loss and record.best_loss - loss > threshold
    count = 0 if has_gain else record.num_without_gain + 1
    if loss < record.best_loss:
        return EvaluationRecord(best_loss=loss, best_step=step, num_without_gain=count)
    return record.model_copy(update={"num_without_gain": count})


class BestModels:
    """Model directories of evaluations with the lowest loss so far, `best/step-N` of a run's output.

    A model stays as long as the run, or a checkpoint that the run may resume from, calls it the
    best one. So a run that is killed at any moment still has the best model of the checkpoint that
    it resumes from.

    Args:
        directory: of the models.
        checkpoints: directory of the run's checkpoints.
    """

    def __init__(self, directory: Path, checkpoints: Path) -> None:
        self._directory, self._checkpoints = directory, checkpoints

    def path(self, step: int) -> Path:
        """The model after `step` steps."""
        return self._directory / f"step-{step:08d}"

    def add(
        self, step: int, save: Callable[[Path], object], in_writing: EvaluationRecord | None = None
    ) -> None:
        """Write the best model so far, and remove those that are not needed any more.

        Args:
            step: number of optimizer steps done.
            save: writes the model into a directory, completely or not at all.
            in_writing: record of the checkpoint that may still be written in the background.

        Raises:
            ResourceError: it cannot be written.
        """
        save(self.path(step))
        needed = {step} if in_writing is None else {step, in_writing.best_step}
        for checkpoint in checkpoint_paths(self._checkpoints):
            try:
                record = open_checkpoint(checkpoint).evaluation
            except CheckpointError:  # damaged, so no run resumes from it
                continue
            needed |= set() if record is None else {record.best_step}
        for old in self._directory.iterdir():
            match = _NAME.fullmatch(old.name)
            if match is not None and int(match[1]) not in needed:
                remove_directory(old)

    def require(self, record: EvaluationRecord) -> None:
        """Check that the model of a record is there.

        Raises:
            CheckpointError: it is not.
        """
        path = self.path(record.best_step)
        if not path.is_dir():
            raise CheckpointError(
                f"[train.run] a run with train.load_best_model_at_end needs its best model; got none in {str(path)!r}; "
                "restore it, or set train.load_best_model_at_end = false"
            )

    def copy(self, record: EvaluationRecord, target: Path) -> None:
        """Write the best model to `target`.

        Raises:
            ResourceError: it cannot be written.
        """
        source = self.path(record.best_step)

        def write(new: Path) -> None:
            shutil.copytree(source, new, dirs_exist_ok=True)

        replace_directory(target, write)
