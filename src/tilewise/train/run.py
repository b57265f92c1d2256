"""A training run from a configuration to a finished model on disk.

`plan_run` checks everything that can be checked before any work: strategy, memory, output,
checkpoints. `run_training` runs the `PlannedRun` that it returns. After Ctrl-C, the current step
finishes and a checkpoint is written. A second Ctrl-C ends the run at once. Only one run at a time
writes to an output directory. It writes checkpoints/, metrics.jsonl, loss.png and model/, and, if
the configuration says so, best/, tensorboard/ and reference_log_probs.json.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, prod
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tilewise import models
from tilewise.checkpoint import (
    ConfigChange,
    EvaluationRecord,
    OtherConfiguration,
    check_replaceable,
    check_writable,
    config_changes,
    describe_changes,
    has_checkpoints,
    latest_checkpoint,
    load_latest,
    lock_directory,
    open_checkpoint,
    remove_leftovers,
)
from tilewise.core import CheckpointError, ConfigError, ResourceError
from tilewise.core.dims import upper_bound
from tilewise.core.limits import available_memory
from tilewise.core.progress import Progress
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import bare
from tilewise.observe import Profile, Trace
from tilewise.train.held_out import BestModels
from tilewise.train.metrics import MetricsFile, draw_loss_curve, read_metrics
from tilewise.train.pacing import TimeBudget
from tilewise.train.progress import StepProgress, format_duration, track_work
from tilewise.train.tensorboard import EventFiles, require_tensorboard
from tilewise.train.train_config import TrainConfig, is_changeable, make_model_config
from tilewise.train.trained_parts import finished_names
from tilewise.train.trainer import Trainer, evaluate_model, make_plan, rate_of
from tilewise.train.training_data import describe_source, prepare_data

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.session import ComputeGraph, GraphInstance, Plan, StepResult

__all__ = [
    "PlannedRun",
    "RunResult",
    "StopRequest",
    "plan_run",
    "run_training",
    "stop_on_interrupt",
    "train_steps",
]

_CHECKPOINTS, _METRICS, _CURVE = "checkpoints", "metrics.jsonl", "loss.png"
_BEST, _TENSORBOARD, _REFERENCE = "best", "tensorboard", "reference_log_probs.json"
_LARGEST_EXPONENT = 700.0  # of a perplexity that a double holds


@dataclass(frozen=True)
class PlannedRun:
    """A run that has been checked and planned. No data is read, and nothing is allocated or written
    yet.

    Attributes:
        config: configuration of the run.
        graph: training graph of a step.
        plan: plan of the graph.
        resume: whether the run continues from the newest complete checkpoint.
        may_change: names `section.key` of settings that may differ from those in the checkpoint
            that the run resumes from.
    """

    config: TrainConfig
    graph: ComputeGraph
    plan: Plan
    resume: bool
    may_change: frozenset[str] = frozenset()

    def describe(self) -> str:
        """Four lines: parameters, mesh, memory per device against what is available, tokens per step."""
        config, mesh = self.config, self.plan.mesh
        model = make_model_config(config)
        count, frozen = models.num_parameters(model), self.plan.graph.frozen
        trained = sum(prod(map(upper_bound, t.shape)) for t in self.plan.graph.trainable())
        part = f"; {trained:,} trained" if frozen else ""
        usage = max(self.plan.estimate_memory_usage(), key=lambda device: device["total"])
        need = self.plan.total_bytes + sum(self.plan.checkpoint_bytes)
        up_to = "up to " if config.data.is_padded else ""
        workers = self.plan.settings.workers_per_device
        axes = ",".join(f"{axis}={size}" for axis, size in config.distribution.mesh.items())
        return "\n".join(
            (
                f"parameters  {count:,} ({model.model_type}), trained in {config.train.dtype}{part}",
                f"mesh        {axes or 'one device'} ({_counted(mesh.num_devices, 'device')}, "
                f"{_counted(workers, 'worker')} each), strategy {config.distribution.strategy}",
                f"memory      {format_bytes(usage['total'])} per device, {format_bytes(need)} in all, of "
                f"{format_bytes(available_memory())} available on this machine",
                f"tokens      {up_to}{config.num_sequences * config.data.context:,} per step "
                f"({config.num_sequences} x {config.data.context}), {_length(config)}",
            )
        )


def _length(config: TrainConfig) -> str:
    epochs = config.train.epochs
    if epochs is None:
        return _counted(config.train.steps, "step")
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        num_steps: number of steps done, including earlier runs.
        interrupted: whether Ctrl-C ended the run before its end, which is its last step or where
            early stopping ends it. Then a checkpoint was written.
        model_dir: directory of the finished model, or of the finished adapter of a run with `[lora]`;
            None if the run was interrupted.
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
    """Turn the first Ctrl-C into a `StopRequest`, so that a step always finishes. The second Ctrl-C
    raises KeyboardInterrupt as usual. In a thread other than the main thread, Ctrl-C makes no
    request, because Python delivers signals only to the main thread.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if request.is_set:
            raise KeyboardInterrupt
        request.is_set = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


def plan_run(
    config: TrainConfig,
    resume: bool | None,
    progress: Progress | None = None,
    may_change: Collection[str] = (),
) -> PlannedRun:
    """Check and plan a run without doing any of its work.

    Args:
        config: configuration of the run.
        resume: whether to continue from the newest checkpoint; None to continue if there is one.
        progress: receives the plan's phases (`ComputeGraph.plan`).
        may_change: names `section.key` of settings that a resumed run may change, for example
            `train.steps`. `is_changeable` must allow each.

    Raises:
        LayoutError, PlanError: the strategy is not possible for this model.
        ResourceError: the run needs more memory than the machine has.
        ConfigError: the context is too long. Or the output cannot be written, would replace the
            model that training starts from, or has checkpoints or a model of an earlier run.
        CheckpointError: there is no checkpoint to resume from, or its settings differ from those of
            `config`.
    """
    if config.output.report_to == "tensorboard":
        require_tensorboard()
    graph, plan = make_plan(config, progress)
    output = Path(config.output.directory)
    checkpoints = output / _CHECKPOINTS
    check_writable(output)
    check_writable(checkpoints)
    if config.output.offload_directory is not None and plan.file_bytes:
        check_writable(Path(config.output.offload_directory))
    if output.is_dir():
        with lock_directory(output):  # reports another run now; the run itself locks it again
            pass
    for name in (_METRICS, _CURVE):
        check_replaceable(output / name, is_directory=False)
    check_replaceable(output / finished_names(config)[0], is_directory=True)
    if resume is None:
        resume = latest_checkpoint(checkpoints) is not None
    _check_output(config, resume)
    changeable = frozenset(filter(is_changeable, may_change))
    if "train.epochs" in changeable:
        changeable |= {"train.steps"}  # which follows from it
    if resume:
        _check_settings(config, checkpoints, changeable)
    return PlannedRun(config, graph, plan, resume, changeable)


def _check_settings(config: TrainConfig, checkpoints: Path, may_change: frozenset[str]) -> None:
    """Compare the settings with those of the newest checkpoint, before any work.

    The data and frozen weights are compared later, when they are read.
    """
    newest = latest_checkpoint(checkpoints)
    assert newest is not None  # checked by `_check_output`
    opened = open_checkpoint(newest)
    settings, data = config.what_must_match(), opened.config.get("data")
    if config.train.epochs is not None:  # the number of steps is compared when the data is read, too
        train = opened.config.get("train")
        settings["train"]["steps"] = train.get("steps") if isinstance(train, Mapping) else None
    settings |= {key: value for key, value in opened.config.items() if key == "frozen"}
    tokens = data.get("tokens") if isinstance(data, Mapping) else None
    try:
        config_changes(opened, {**settings, "data": {**settings["data"], "tokens": tokens}}, may_change)
    except OtherConfiguration as error:
        raise _refusal_of_changes(error) from None
    if config.train.epochs is None:
        _check_steps_left(config, opened.step)
    _check_best_model(config, opened.evaluation)


def _check_best_model(config: TrainConfig, record: EvaluationRecord | None) -> None:
    """Check that the best model of a checkpoint exists, if the run needs it."""
    if config.train.load_best_model_at_end and record is not None:
        _best_models(config).require(record)


def _best_models(config: TrainConfig) -> BestModels:
    output = Path(config.output.directory)
    return BestModels(output / _BEST, output / _CHECKPOINTS)


def _check_steps_left(config: TrainConfig, num_done: int) -> None:
    """Check that a run does not end before the step that it resumes from."""
    if num_done > config.train.steps:
        raise ConfigError(
            f"[train.run] train.steps must not be below the steps that are done; got {config.train.steps} "
            f"after {num_done} steps; set {num_done} or more"
        )


def run_training(run: PlannedRun, console: Console, explain: bool = False) -> RunResult:
    """Train as planned.

    Args:
        run: result of `plan_run`.
        console: shows the run's four lines (`PlannedRun.describe`), progress, and the files
            written.
        explain: show the whole plan (`Plan.explain`), too.

    Raises:
        ConfigError, CheckpointError: another run writes to the output directory, or the data or the
            checkpoint differs from the configuration.
        NotFinite: values are no longer finite. The last checkpoint was written before that.
        ResourceError, TaskFailed, CommError: the run failed. The last checkpoint is complete.
    """
    output = Path(run.config.output.directory)
    with lock_directory(output):
        _check_output(run.config, run.resume)  # again, now that no other run can write there
        remove_leftovers(output)
        return _run_alone(run, output, console, explain)


def _run_alone(run: PlannedRun, output: Path, console: Console, explain: bool) -> RunResult:
    """Run the training in an output directory that no other run writes to."""
    config = run.config
    data = prepare_data(config, console)
    for source in data.sources:
        if source.source.type != "text" or source.source.excess_length_strategy != "split":
            _say(console, describe_source(source))
    _say(console, run.describe())
    if explain:
        _say(console, run.plan.explain())
    with Trainer(config, data, run.graph, run.plan) as trainer:
        if run.config.data.is_preference:
            trainer.prepare_reference(output / _REFERENCE, console, may_read=run.resume)
        first_step = _restore(trainer, output / _CHECKPOINTS, run.may_change, console) if run.resume else 0
        name, file = finished_names(config)
        finished = output / name
        is_over = first_step == trainer.config.train.steps or trainer.is_stopped_early
        if is_over and (finished / file).is_file():
            note = f"{finished} is unchanged; evaluate it with tilewise evaluate"
            words = "stopped early after step {}" if trainer.is_stopped_early else "all {} steps are done"
            _say(console, f"{words.format(first_step)}, and {note}")
            return RunResult(first_step, False, finished)
        num_steps = first_step if is_over else train_steps(trainer, first_step, output, console)
        _draw_curve(output)
        if num_steps < trainer.config.train.steps and not trainer.is_stopped_early:
            _say(console, f"stopped after step {num_steps}; resume with --resume")
            return RunResult(num_steps, True, None)
        _write_finished(trainer, finished, console)
    # The trainer's memory is free now, so the finished model can be loaded and evaluated.
    if data.corpus.held_out and not models.is_encoder(make_model_config(config)):
        try:
            bits = evaluate_model(config, data, finished, console)
            _say(console, f"held-out files: {bits:.3f} bits per byte")
        except ResourceError as error:  # a run that offloads weights may need less memory than its evaluation
            _say(console, f"the held-out files are not evaluated: {error}")
    return RunResult(num_steps, False, finished)


def _draw_curve(output: Path) -> None:
    """Draw the curves of the steps that have a loss."""
    lines = [line for line in read_metrics(output / _METRICS) if line["loss"] is not None]
    if not lines:
        return
    held_out = [(i, line["held_out_loss"]) for i, line in enumerate(lines) if "held_out_loss" in line]
    losses = [line["loss"] for line in lines]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    rates = rates if len(rates) == len(lines) else []  # an earlier version began the run
    draw_loss_curve(output / _CURVE, losses, f"loss over {len(lines)} steps", held_out, rates)


def _write_finished(trainer: Trainer, finished: Path, console: Console) -> None:
    """Write the finished model, or adapter: the best one, if the configuration says so, else that of
    the last step.
    """
    words, record = f"loss curve in {finished.parent / _CURVE}", trainer.evaluation
    if trainer.config.train.load_best_model_at_end and record is not None:
        _best_models(trainer.config).copy(record, finished)
        best = f"of step {record.best_step}, with the lowest held-out loss, {record.best_loss:.4f}"
        _say(console, f"{finished.name} {best}, in {finished}, {words}")
        return
    trainer.save_model(finished)
    _say(console, f"{finished.name} in {finished}, {words}")


def _restore(trainer: Trainer, checkpoints: Path, may_change: frozenset[str], console: Console) -> int:
    """Resume from the newest complete checkpoint, and report damaged ones. Returns the number of
    steps done.
    """
    try:
        with track_work(console, "checking the checkpoint") as progress:
            path, state = load_latest(
                checkpoints,
                trainer.what_must_match(),
                lambda text: _say(console, text),
                progress.show,
                may_change,
            )
    except OtherConfiguration as error:
        raise _refusal_of_changes(error) from None
    state = replace(state, changes=_with_defaults(state.changes))
    _check_steps_left(trainer.config, state.step)
    _check_best_model(trainer.config, state.evaluation)
    trainer.restore(state)
    _say(console, f"resuming after step {state.step} from {path}")
    new = [change for change in state.changes if change.step == state.step]
    if new:
        _say(console, f"changed settings: {describe_changes(new)}")
    return state.step


def _with_defaults(changes: Sequence[ConfigChange]) -> list[ConfigChange]:
    """The changes, including settings that `what_must_match` leaves out at their defaults."""
    filled = []
    for change in changes:
        section, _, key = change.key.partition(".")
        if is_changeable(change.key) and None in (change.old, change.new):
            default = getattr(getattr(TrainConfig(), section), key)
            values = {n: default if v is None else v for n, v in (("old", change.old), ("new", change.new))}
            filled.append(change.model_copy(update=values))
        else:
            filled.append(change)
    return filled


def _refusal_of_changes(error: OtherConfiguration) -> CheckpointError:
    """The error for settings that differ from a checkpoint's. Its message says which settings can
    be changed, and how.
    """
    changes = _with_defaults(error.changes)
    fixed = [change.key for change in changes if not is_changeable(change.key)]
    if fixed:
        advice = f"restore {', '.join(fixed)}, which a run cannot change, or train in another directory"
    else:
        before = ", ".join(f"{change.key} = {_toml(change.old)}" for change in changes)
        repeated = _set_options([(change.key, change.old) for change in changes])
        advice = f"put {before} into the file, or pass {repeated}"
        if not any(change.key == "train.steps" and change.new < change.step for change in changes):
            new = _set_options([(change.key, change.new) for change in changes])
            advice += f"; to change the rest of the run, pass {new}"
    return CheckpointError(
        "[train.run] a resumed run must have the settings of its checkpoint; got "
        f"{describe_changes(changes)} in {error.path}; {advice}"
    )


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _set_options(settings: Sequence[tuple[str, object]]) -> str:
    """Settings as options of the command line, which need no quotes around strings."""
    return " ".join(f"--set {k}={bare(v) if isinstance(v, str) else _toml(v)}" for k, v in settings)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)


def train_steps(
    trainer: Trainer, first_step: int, output: Path, console: Console, budget: TimeBudget | None = None
) -> int:
    """Do the remaining steps with progress, metrics, evaluations and checkpoints.

    Returns:
        The number of steps done, including earlier runs.
    """
    config = trainer.config
    checkpoints = output / _CHECKPOINTS
    traced = _TracedStep(trainer.instance, first_step + 2)
    started = time.perf_counter()
    with (
        stop_on_interrupt() as request,
        StepProgress(console, config.train.steps, first_step) as progress,
        _Reports(output, config, first_step) as reports,
    ):

        def on_step(number: int, result: StepResult) -> bool:
            traced.step_done(number)
            done, rate, held_out = number + 1, rate_of(trainer.config, number), dict[str, float]()
            every = config.train.evaluate_every
            # a run that Ctrl-C ends skips an evaluation, unless the resumed run needs to know its result
            if every and done % every == 0 and (not request.is_set or trainer.needs_evaluations):
                held_out = _evaluate(trainer, done, progress)
            progress.step_done(number, result.loss, trainer.num_tokens)
            seconds = time.perf_counter() - started
            if result.is_skipped:
                console.print(
                    f"step {number + 1} skipped: loss {result.loss}, gradient norm {result.grad_norm}"
                )
                reports.add(step=number, loss=None, seconds=seconds, learning_rate=rate, **held_out)
            else:
                figures = {"grad_norm": result.grad_norm, "learning_rate": rate}
                figures |= {**trainer.rewards, **held_out}
                reports.add(step=number, loss=result.loss, seconds=seconds, **figures)
            if budget is not None and (num_steps := budget.step_done(seconds)) is not None:
                trainer.set_num_steps(num_steps)
                progress.set_num_steps(num_steps)
            is_last = done == trainer.config.train.steps or trainer.is_stopped_early
            if request.is_set or done % config.output.checkpoint_every == 0 or is_last:
                trainer.save(checkpoints, done)
            traced.prepare(done)
            return not request.is_set and not trainer.is_stopped_early

        try:
            num_steps = trainer.run(first_step, on_step)
        finally:
            progress.stop()
        trainer.finish_saving(console)
    seconds = time.perf_counter() - started
    console.print(f"{num_steps - first_step} steps in {format_duration(seconds)}", highlight=False)
    if trainer.is_stopped_early:
        patience = _counted(config.train.early_stopping_patience, "evaluation")
        _say(console, f"stopped early after step {num_steps}: no gain in {patience}")
    if (sentence := traced.sentence()) is not None:
        console.print(sentence, highlight=False)
    return num_steps


def _evaluate(trainer: Trainer, num_steps: int, progress: StepProgress) -> dict[str, float]:
    """Evaluate the held-out data, and keep the model if it is the best so far. Returns the figures
    that are finite.
    """
    loss = trainer.evaluate()
    progress.evaluated(loss)
    if trainer.record_evaluation(num_steps, loss):
        _best_models(trainer.config).add(num_steps, trainer.save_model, trainer.saved_evaluation)
    figures = {"held_out_loss": loss}
    if trainer.config.data.is_preference:
        figures |= {f"held_out_{name}": value for name, value in trainer.held_out_rewards.items()}
    else:
        figures["held_out_perplexity"] = exp(loss) if loss < _LARGEST_EXPONENT else inf  # NaN stays
    return {name: value for name, value in figures.items() if isfinite(value)}


class _Reports:
    """The files with a run's figures, as a `with` block.

    Args:
        output: output directory of the run.
        config: configuration of the run.
        first_step: number of steps done before.
    """

    def __init__(self, output: Path, config: TrainConfig, first_step: int) -> None:
        self._metrics = MetricsFile(output / _METRICS, first_step)
        is_drawn = config.output.report_to == "tensorboard"
        self._events = EventFiles(output / _TENSORBOARD, first_step) if is_drawn else None

    def add(self, *, step: int, **figures: float | None) -> None:
        """Write the figures of a step, which is 0 for the first."""
        self._metrics.add(step=step, **figures)
        if self._events is not None:
            self._events.add(step + 1, figures)

    def __enter__(self) -> _Reports:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        if self._events is not None:
            self._events.close()


class _TracedStep:
    """Traces the third step of a run over several devices: the first two warm caches and memory.

    Args:
        instance: the model in training.
        number: the number of the step, from 0.
    """

    def __init__(self, instance: GraphInstance, number: int) -> None:
        self._instance, self._number = instance, number
        self._is_on = instance.plan.mesh.num_devices > 1
        self._trace: Trace | None = None

    def prepare(self, number: int) -> None:
        """Switch tracing on if `number` is the step to trace. Call this before each step."""
        if self._is_on and number == self._number:
            self._instance.trace(True)

    def step_done(self, number: int) -> None:
        """Read the records if `number` is the traced step. Call this after each step."""
        if self._is_on and number == self._number:
            self._trace = self._instance.timeline()
            self._instance.trace(False)

    def sentence(self) -> str | None:
        """How much of the step's communication was hidden; None if no step was traced."""
        if self._trace is None or not self._trace.tasks:
            return None
        figures = Profile(self._trace).overlap.sentence()
        return f"step {self._number + 1}: {figures}"


def _check_output(config: TrainConfig, resume: bool) -> None:
    """Reject an output directory in which the run would replace the model that it starts from, or,
    for a new run, any model.
    """
    model, source = Path(config.output.directory) / finished_names(config)[0], config.model.path
    if source is not None and model.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise ConfigError(
            f"[train.run] the finished model must not replace the initial model; got {str(model)!r} "
            "for both; choose another output directory"
        )
    _check_checkpoints(Path(config.output.directory) / _CHECKPOINTS, resume)
    if not resume and os.path.lexists(model):
        raise ConfigError(
            f"[train.run] a new run needs an output directory without {_a(model.name)}; got {str(model)!r}; move it "
            "away, or choose another directory"
        )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _check_checkpoints(directory: Path, resume: bool) -> None:
    """Reject resuming without a checkpoint, and starting in a directory with checkpoints of an
    earlier run, including damaged ones.
    """
    if resume and latest_checkpoint(directory) is None:
        raise CheckpointError(
            f"[train.run] --resume needs a complete checkpoint; got none in {str(directory)!r}; "
            f"start {'in another directory' if has_checkpoints(directory) else 'without --resume'}"
        )
    if not resume and has_checkpoints(directory):
        raise ConfigError(
            f"[train.run] a new run needs an output directory without checkpoints; got some in {str(directory)!r}; "
            "pass --resume to continue, or choose another directory"
        )
