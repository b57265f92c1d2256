"""A training run from a configuration to a finished model on disk.

`plan_run` checks everything that can be checked before any work: strategy, memory, output, checkpoints; what it
returns is run by `run_training`. Ctrl-C lets the step at hand finish, writes a checkpoint and returns; a second
Ctrl-C ends at once. What it leaves in the output directory: checkpoints/, metrics.jsonl, loss.png, model/.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tilewise.checkpoint import check_writable, latest_checkpoint
from tilewise.core import CheckpointError, ConfigError
from tilewise.train.config import TrainConfig
from tilewise.train.metrics import MetricsFile, draw_loss_curve, read_metrics
from tilewise.train.progress import StepProgress, format_duration
from tilewise.train.trainer import Trainer, evaluate_model, make_plan, prepare_data

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.plan import Plan
    from tilewise.session import ComputeGraph, StepResult

__all__ = [
    "PlannedRun",
    "RunResult",
    "StopRequest",
    "plan_run",
    "run_training",
    "stop_on_interrupt",
    "train_steps",
]


@dataclass(frozen=True)
class PlannedRun:
    """A run that was found possible; nothing is read, allocated or written yet.

    Attributes:
        checkpoint: to go on from; None for a new run.
    """

    config: TrainConfig
    graph: ComputeGraph
    plan: Plan
    checkpoint: Path | None


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        num_steps: done in all, earlier runs included.
        interrupted: whether Ctrl-C ended it; a checkpoint was written.
        model_dir: the finished model; None when interrupted.
    """

    num_steps: int
    interrupted: bool
    model_dir: Path | None


class StopRequest:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.is_set = False


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C into a request, so that a step is never cut in two; the second raises as
    usual."""
    request = StopRequest()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if request.is_set:
            raise KeyboardInterrupt
        request.is_set = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


def plan_run(config: TrainConfig, resume: bool) -> PlannedRun:
    """Check and plan a run without doing any of its work.

    Args:
        resume: go on from the newest checkpoint.

    Raises:
        LayoutError, PlanError: the strategy cannot spread this model.
        ResourceError: it needs more memory than the machine has.
        ConfigError: output cannot be written, or holds checkpoints of an earlier run.
        CheckpointError: there is no checkpoint to go on from.
    """
    graph, plan = make_plan(config)
    output = Path(config.output.directory)
    checkpoints = output / "checkpoints"
    check_writable(output)
    check_writable(checkpoints)
    return PlannedRun(config, graph, plan, _checkpoint_to_resume(checkpoints, resume))


def run_training(run: PlannedRun, console: Console) -> RunResult:
    """Train as planned.

    Raises:
        ConfigError, CheckpointError: the data or the checkpoint is not what the configuration says.
        NotFinite: numbers ceased to be finite; the last checkpoint is from before.
        ResourceError, TaskFailed, CommError: while working; the last checkpoint is whole.
    """
    config, checkpoint, output = run.config, run.checkpoint, Path(run.config.output.directory)
    data = prepare_data(config, console)
    console.print(run.plan.explain(), highlight=False, markup=False)
    output.mkdir(parents=True, exist_ok=True)
    with Trainer(config, data, run.graph, run.plan) as trainer:
        first_step = 0 if checkpoint is None else trainer.restore(checkpoint)
        if checkpoint is not None:
            console.print(f"going on after step {first_step} from {checkpoint}", highlight=False)
        num_steps = train_steps(trainer, first_step, output, console)
        losses = [line["loss"] for line in read_metrics(output / "metrics.jsonl") if "loss" in line]
        if losses:
            draw_loss_curve(output / "loss.png", losses, f"loss over {len(losses)} steps")
        if num_steps < config.train.steps:
            console.print(f"stopped after step {num_steps}; go on with --resume", highlight=False)
            return RunResult(num_steps, True, None)
        trainer.save_model(output / "model")
        console.print(f"model in {output / 'model'}, loss curve in {output / 'loss.png'}", highlight=False)
        if data.corpus.held_out:
            bits = evaluate_model(config, data, output / "model", console)
            console.print(f"held-out files: {bits:.3f} bits per byte", highlight=False)
    return RunResult(num_steps, False, output / "model")


def train_steps(trainer: Trainer, first_step: int, output: Path, console: Console) -> int:
    """Do the remaining steps with progress, metrics and checkpoints; returns the number of steps done in
    all."""
    config = trainer.config
    checkpoints = output / "checkpoints"
    metrics = MetricsFile(output / "metrics.jsonl", first_step)
    started = time.perf_counter()
    with (
        stop_on_interrupt() as request,
        StepProgress(console, config.train.steps, first_step, trainer.tokens_per_step) as progress,
    ):

        def on_step(number: int, result: StepResult) -> bool:
            progress.step_done(number, result.loss)
            seconds = time.perf_counter() - started
            if result.is_skipped:
                console.print(
                    f"step {number + 1} skipped: loss {result.loss}, gradient norm {result.grad_norm}"
                )
                metrics.add(step=number, skipped=True, seconds=seconds)
            else:
                metrics.add(step=number, loss=result.loss, grad_norm=result.grad_norm, seconds=seconds)
            done = number + 1
            if request.is_set or done % config.output.checkpoint_every == 0 or done == config.train.steps:
                trainer.save(checkpoints, done)
            return not request.is_set

        try:
            num_steps = trainer.run(first_step, on_step)
        finally:
            metrics.close()
    seconds = time.perf_counter() - started
    console.print(f"{num_steps - first_step} steps in {format_duration(seconds)}", highlight=False)
    return num_steps


def _checkpoint_to_resume(directory: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from; None for a new run."""
    found = latest_checkpoint(directory)
    if resume and found is None:
        raise CheckpointError(
            f"[train.run] --resume needs a whole checkpoint; got none in {directory}; start without --resume"
        )
    if not resume and found is not None:
        raise ConfigError(
            f"[train.run] a new run needs an output directory without checkpoints; got {found}; "
            "pass --resume to go on, or choose another directory"
        )
    return found
