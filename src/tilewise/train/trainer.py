"""`Trainer`: a model in training, with its plan, its instance and its data.

The trainer owns the instance and closes it. The batch and the learning rate of a step depend only
on the step's number. So measuring, evaluating, interrupting and resuming do not change the result.
Trained weights are written as a Hugging Face directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise import models
from tilewise.checkpoint import (
    CheckpointWriter,
    ConfigChange,
    EvaluationRecord,
    FinishedModel,
    PartedTensor,
    StoredWeights,
    TrainingState,
    cast_tensors,
    model_files,
    save_checkpoint,
)
from tilewise.checkpoint.header import dtype_name
from tilewise.core import ConfigError, LayoutError, NotFinite, TilewiseError, get_logger
from tilewise.core.dims import Dim
from tilewise.core.progress import Progress
from tilewise.core.tree import allowed_widths
from tilewise.data import IGNORED, PairBatches
from tilewise.files.writing import writing
from tilewise.train.evaluation import score_files
from tilewise.train.held_out import every_window, with_evaluation
from tilewise.train.preference import (
    pair_figures,
    pairs_digest,
    read_reference,
    reference_log_probs,
    write_reference,
)
from tilewise.train.progress import track_work
from tilewise.train.train_config import (
    TrainConfig,
    make_model_config,
    make_optimizer,
    make_strategy,
    with_steps_of_epochs,
)
from tilewise.train.trained_parts import (
    frozen_digest,
    opened_finished,
    resident_formats,
    save_finished,
    trained_parts,
)
from tilewise.train.training_data import TrainingData

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from tokenizers import Tokenizer

    from tilewise.session import ComputeGraph, GraphInstance, Plan, StepResult

__all__ = [
    "Trainer",
    "evaluate_model",
    "finished_model",
    "make_graph",
    "make_plan",
    "rate_of",
]

MOST_SKIPPED = 10  # consecutive steps; after so many the weights are probably unusable


def make_graph(
    config: TrainConfig, *, is_padded: bool, formats: Mapping[str, str] | None = None
) -> ComputeGraph:
    """The training graph with its loss, without optimizer and strategy.

    Args:
        is_padded: whether each step has its own length, up to the context.
        formats: of weights that stay quantised, by name.
    """
    from tilewise.session import ComputeGraph  # imports the native module

    model, train, parts = make_model_config(config), config.train, trained_parts(config)
    graph = ComputeGraph(model.model_type, adapters=parts.adapters, formats=formats)
    context = config.data.context
    if context > models.max_context(model):
        raise ConfigError(
            f"[train.plan] sequences.context must not be above the {models.max_context(model)} positions of the model; "
            f"got {context}; lower it"
        )
    length = Dim("seq", 1, context) if is_padded else context
    preference = config.dpo.loss if config.dpo else None
    models.build_training_graph(
        graph,
        model,
        config.num_sequences,
        length,
        train.dtype,
        preference=preference,
        has_documents=config.data.separates_documents and not is_padded,
    )
    parts.apply(graph)
    return graph


def make_plan(
    config: TrainConfig, progress: Progress | None = None, *, must_fit: bool = True
) -> tuple[ComputeGraph, Plan]:
    """The training graph with optimizer and strategy, and its plan. Nothing is allocated.

    Args:
        config: configuration of the run.
        progress: receives the plan's phases (`ComputeGraph.plan`).
        must_fit: reject a plan that needs more memory than this machine has.

    Raises:
        LayoutError, PlanError: the strategy is not possible for this model.
        ResourceError: the plan needs more memory than available. The copy for checkpoints in the
            background counts as part of the need.
    """

    def make(formats: Mapping[str, str]) -> tuple[ComputeGraph, Plan]:
        graph = make_graph(config, is_padded=config.data.is_padded, formats=formats)
        graph.optimize(make_optimizer(config))
        graph.set_distribution(make_strategy(config))
        plan = graph.plan(
            accumulation=config.train.accumulation,
            batch_splits=config.train.batch_splits,
            recompute=config.train.recompute,
            offload=config.train.offload,
            workers_per_device=config.distribution.workers_per_device,
            rows_per_tile=config.train.rows_per_tile,
            checkpoints=config.output.checkpoint_in_background,
            progress=progress,
        )
        return graph, plan

    try:
        (graph, plan), _ = models.plan_in_formats(resident_formats(config), make)
    except LayoutError as error:
        _check_batch_splits(config, error)
        raise
    if must_fit:
        plan.require_memory()
    return graph, plan


def _check_batch_splits(config: TrainConfig, error: LayoutError) -> None:
    """Report, with the names of the configuration, which settings of the batch fit the devices.

    Raises:
        LayoutError: the devices that share the batch, times accumulation, do not fit
            `train.batch_splits`.
    """
    train, mesh = config.train, config.distribution.mesh
    devices = mesh.get("dp", 1) * mesh.get("fsdp", 1)
    parts = devices * train.accumulation
    widths = allowed_widths(train.batch_splits)
    if parts in widths:
        return
    batch = parts * -(-train.batch // parts)
    advice = f"set train.batch_splits = {parts}"
    if batch != train.batch:
        advice = f"set train.batch = {batch} and train.batch_splits = {parts}"
    raise LayoutError(
        "[train.plan] devices that share the batch x train.accumulation must fit train.batch_splits; got "
        f"{devices} x {train.accumulation} and {train.batch_splits}; {advice} (it affects the result), or choose a "
        f"product of {', '.join(map(str, widths))} ({error})"
    ) from None


def evaluate_model(config: TrainConfig, data: TrainingData, model_dir: Path, console: Console) -> float:
    """Bits per byte that a saved model, or a saved adapter on its base, needs for the held-out files, computed in the
    configuration's dtype.

    The model is loaded from its directory. Batches have the size of one microbatch of training.

    Raises:
        CheckpointError: `model_dir` has another model.
    """
    batch, context = config.train.batch // config.train.accumulation, config.data.context
    train = config.train.model_copy(update={"batch": batch})
    graph = make_graph(config.model_copy(update={"train": train}), is_padded=True)
    graph.draft.loss_id = None  # so that the plan has no backward pass
    graph.set_distribution(make_strategy(config))
    plan = graph.plan(
        batch_splits=config.train.batch_splits // config.train.accumulation,
        workers_per_device=config.distribution.workers_per_device,
    )
    with graph.instantiate(plan) as model, track_work(console, "held-out files") as progress:
        model.load_parameters(opened_finished(model_dir, config))
        files = data.corpus.held_out
        marks = {"start": data.end, "end": data.end, "vocab_size": make_model_config(config).vocab_size}
        score = score_files(model, data.tokenizer, files, batch, context, **marks, show=progress.show)
        return score.bits_per_byte


class Trainer:
    """A model in training. Use it with `with`, or call `close`.

    Args:
        config: configuration of the run.
        data: result of `prepare_data`.
        graph: training graph from `make_plan`.
        plan: plan from `make_plan`.

    Attributes:
        num_tokens: tokens of the last step, without padding.
        changes: changes of the configuration since the run began. Checkpoints record them.
        evaluation: the best evaluation so far, and the count of early stopping. Checkpoints record
            it. None before the first evaluation, and if the run uses neither.
        rewards: of a run on pairs, `reward_margin` and `reward_accuracy` of the last step, as means over
            its pairs; only finite ones.
        held_out_rewards: the same of the last evaluation.
        saved_evaluation: the same at the last checkpoint, which may still be written in the background.

    Raises:
        ResourceError: the plan needs more memory than available.
    """

    def __init__(self, config: TrainConfig, data: TrainingData, graph: ComputeGraph, plan: Plan) -> None:
        self.config = config = with_steps_of_epochs(config, data.batches.num_windows)
        self.data = data
        self.num_tokens = 0
        self.changes: Sequence[ConfigChange] = ()
        self.evaluation: EvaluationRecord | None = None
        self.saved_evaluation: EvaluationRecord | None = None
        self.rewards: dict[str, float] = {}
        self.held_out_rewards: dict[str, float] = {}
        self._num_skipped = 0  # consecutive steps that were not finite
        self._writer = CheckpointWriter()
        model = make_model_config(config)
        weights = None if config.model.path is None else models.open_weights(config.model.path, model)
        self._parts, self._base = trained_parts(config), weights
        self._finished = finished_model(config, data.tokenizer, weights)
        where = Path(config.output.offload_directory or config.output.directory)
        if plan.file_bytes:
            with writing(where):
                where.mkdir(parents=True, exist_ok=True)
        self.instance: GraphInstance = graph.instantiate(plan, offload_directory=where)
        try:
            if weights is None:
                self.instance.initialize(seed=config.train.seed, scale=model.initializer_range)
            else:
                self.instance.load_parameters(self._parts.weights(weights, config.train.seed))
        except BaseException:
            self.instance.close()
            raise

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            if not issubclass(kind, Exception):
                self._writer.give_up()  # after a second Ctrl-C, nothing is awaited
            self.close()
        except TilewiseError as error:  # the exception in progress already explains the end of the run
            get_logger("train").warning("%s", error)

    def close(self) -> None:
        """Wait until the last checkpoint is written, stop the devices and free their memory.

        Raises:
            ResourceError: a checkpoint could not be written; older ones are kept.
        """
        try:
            self._writer.wait()
        finally:
            self.instance.close()

    def step(self, number: int) -> StepResult:
        """Do step `number`.

        Raises:
            NotFinite: loss or gradient is not finite, and the configuration says `stop`, or this
                has happened in ten consecutive steps. The message names the first tensor that is
                not finite. Weights are as before the step.
            ResourceError: a checkpoint could not be written. Older checkpoints are kept, and no
                step was done.
        """
        self._require_reference()
        self._writer.check()
        is_last_chance = self._num_skipped + 1 >= MOST_SKIPPED
        on_nonfinite = "stop" if is_last_chance else self.config.train.on_nonfinite
        batch = self.data.batches.at(number)
        result = self.instance.step(batch, lr=rate_of(self.config, number), on_nonfinite=on_nonfinite)
        self._num_skipped = self._num_skipped + 1 if result.is_skipped else 0
        self.num_tokens = _num_tokens(batch, self.data.end)
        if self.config.data.is_preference:
            self.rewards = _finite_means(self._pair_figures(batch))
        return result

    def _pair_figures(self, batch: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
        """Figures about the pairs of the batch that the instance computed last."""
        assert self.config.dpo is not None
        return pair_figures(self.config.dpo.loss, batch, self.instance.get_tensor("log_probs"))

    def prepare_reference(self, path: Path, console: Console, *, may_read: bool) -> None:
        """Compute the log-probabilities that the reference model, which is the model before its first
        step, gives the pairs. Runs on other data need none. Call this before the first step, and before
        the state of a checkpoint is loaded.

        Args:
            path: file that keeps them.
            console: shows progress.
            may_read: read the file, if it belongs to the same data. The file of another run may be that
                of another model.

        Raises:
            NotFinite: a log-probability is not finite.
            ResourceError: the file cannot be written.
        """
        batches, held_out = self.data.batches, self.data.held_out
        if not isinstance(batches, PairBatches):
            return
        digest = pairs_digest(batches, held_out)
        num_held_out = 0 if held_out is None else held_out.num_windows
        stored = read_reference(path, digest, batches.num_windows, num_held_out) if may_read else None
        if stored is None:
            values = []
            for part in (batches, held_out):
                values.append(np.empty((0, 2), np.float32))
                if isinstance(part, PairBatches):
                    with track_work(console, "reference log-probabilities") as progress:
                        values[-1] = reference_log_probs(self.instance, part, progress.show)
            stored = values[0], values[1]
            write_reference(path, digest, *stored)
        batches = replace(batches, reference=stored[0])
        held_out = replace(held_out, reference=stored[1]) if isinstance(held_out, PairBatches) else None
        self.data = replace(self.data, batches=batches, held_out=held_out)

    def set_num_steps(self, num_steps: int) -> None:
        """Change the number of steps of the whole run. This changes the learning rate from the next
        step on.
        """
        train = self.config.train.model_copy(update={"steps": num_steps})
        self.config = self.config.model_copy(update={"train": train})

    def run(self, first_step: int, on_step: Callable[[int, StepResult], bool]) -> int:
        """Do the steps from `first_step` to the last.

        Args:
            on_step: called with number and result after each step. If it returns False, the run
                ends.

        Returns:
            The number of steps done, including earlier runs.
        """
        number = first_step
        while number < self.config.train.steps:
            number += 1
            if not on_step(number - 1, self.step(number - 1)):
                break
        return number

    def what_must_match(self) -> dict[str, Any]:
        """The configuration and data that determine the result, without strategy and paths. Equal
        for runs that compute the same.
        """
        settings = self.config.what_must_match()
        settings = {**settings, "data": {**settings["data"], "tokens": self.data.digest}}
        return settings if self._frozen is None else {**settings, "frozen": self._frozen}

    @cached_property
    def _frozen(self) -> str | None:
        """The digest of the frozen weights, which checkpoints do not have; None if all are trained."""
        trained = {*self.instance.trainable_names()}
        names = [name for name in self.instance.parameter_names() if name not in trained]
        if not names:
            return None
        assert self._base is not None
        continued = self._parts.adapter_weights or {}
        return frozen_digest({**self._base, **continued}, [*names, *continued])

    def evaluate(self) -> float:
        """The mean loss over all held-out data, in nats per predicted token, or per pair.

        This runs the forward pass of the trainer's instance, so it needs no second copy of the
        weights. It changes neither weights nor optimizer states. Windows are formed as in training.
        """
        held_out = self.data.held_out
        assert held_out is not None  # read if the configuration evaluates
        if isinstance(held_out, PairBatches):
            return self._evaluate_pairs(held_out)
        nats, num_tokens = 0.0, 0
        for batch in every_window(held_out):
            counted = int((batch["labels"] != IGNORED).sum())
            if counted:
                self.instance.forward(**batch)
                nats += float(self.instance.get_tensor("loss").reshape(())) * counted
                num_tokens += counted
        return nats / max(num_tokens, 1)

    def _require_reference(self) -> None:
        """Check that `prepare_reference` was called, if the data are pairs."""
        if isinstance(self.data.batches, PairBatches) and self.data.batches.reference is None:
            raise ConfigError(
                "[train.step] a run on pairs needs the log-probabilities of its reference; got none; call "
                "prepare_reference first"
            )

    def _evaluate_pairs(self, held_out: PairBatches) -> float:
        self._require_reference()
        count, size = held_out.num_windows, held_out.batch
        parts: list[dict[str, NDArray[np.float64]]] = []
        for first in range(0, count, size):
            numbers = [min(first + i, count - 1) for i in range(size)]  # the last batch repeats the last pair
            batch = held_out.batch_of(numbers)
            self.instance.forward(**batch)
            figures = self._pair_figures(batch)
            parts.append({name: values[: count - first] for name, values in figures.items()})
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        self.held_out_rewards = _finite_means(whole)
        return float(whole["loss"].mean())

    @property
    def needs_evaluations(self) -> bool:
        """Whether the run's end or its finished model depends on its evaluations."""
        return self.config.train.load_best_model_at_end or self.config.train.early_stopping_patience > 0

    def record_evaluation(self, num_steps: int, loss: float) -> bool:
        """Record an evaluation for the best model and for early stopping, if the run uses them.

        Args:
            num_steps: steps done.
            loss: held-out loss.

        Returns:
            Whether this is the lowest loss so far, and the run keeps its best model.
        """
        train = self.config.train
        if self.needs_evaluations:
            threshold = train.early_stopping_threshold
            self.evaluation = with_evaluation(self.evaluation, num_steps, loss, threshold)
        is_best = self.evaluation is not None and self.evaluation.best_step == num_steps
        return is_best and train.load_best_model_at_end

    @property
    def is_stopped_early(self) -> bool:
        """Whether evaluations have not improved for as long as `early_stopping_patience` says."""
        patience, record = self.config.train.early_stopping_patience, self.evaluation
        return patience > 0 and record is not None and record.num_without_gain >= patience

    def save(self, directory: Path, num_steps: int) -> Path:
        """Write a checkpoint after `num_steps` steps, with one file per device. First wait until
        the previous checkpoint is written.

        In the background (`output.checkpoint_in_background`), the state is copied now and written
        while training continues. Otherwise it is read from the devices while it is written, and
        this call returns when everything is written.

        Returns:
            The checkpoint's path. If it is written in the background, the checkpoint exists when
            `finish_saving` has returned.

        Raises:
            NotFinite: a weight or moment is not finite. Then nothing is written.
            ResourceError: the previous checkpoint could not be written.
        """
        self._writer.wait()  # the plan has memory for one copy
        output = self.config.output
        copy = self.instance.copy_state
        tensors = copy() if output.checkpoint_in_background else copy(lazily=True)
        not_finite = next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)
        if not_finite is not None:
            raise NotFinite(
                f"[train.save] weights must be finite; got NaN or infinity in {not_finite} after step {num_steps}; "
                "train again with a lower learning rate"
            )
        mesh = self.instance.plan.mesh
        axes = {name: size for name, size in zip(mesh.names, mesh.sizes) if size > 1}
        state = TrainingState(num_steps, tensors, self._finished, axes, self.changes, self.evaluation)
        self.saved_evaluation = self.evaluation
        write = self._writer.write if output.checkpoint_in_background else save_checkpoint
        return write(directory, state, self.what_must_match(), output.keep_checkpoints)

    def finish_saving(self, console: Console) -> None:
        """Wait until the last checkpoint is written. Show this on the console if it takes time.

        Raises:
            ResourceError: the checkpoint could not be written. Older checkpoints are kept.
        """
        if self._writer.is_busy:
            console.print("waiting for the last checkpoint to be written", highlight=False)
            with track_work(console, "writing the checkpoint") as progress:
                self._writer.wait(progress.show)
        self._writer.wait()

    def restore(self, state: TrainingState) -> None:
        """Load the state of a checkpoint of this configuration.

        Raises:
            CheckpointError: the state lacks a tensor, or has a tensor with a wrong shape.
        """
        self.instance.load_state_dict(dict(state.tensors))
        self.changes = state.changes
        self.evaluation = state.evaluation if self.needs_evaluations else None

    def save_model(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory, with tokenizer, chat templates and
        generation settings. These files and frozen weights are copied unchanged from the model that
        training started from, if there was one. Of a run with adapters, write these in PEFT's form.
        """
        trained = {*self.instance.trainable_names()}
        frozen = {n: self._base[n] for n in self._base if n not in trained} if self._base else {}
        parameters = cast_tensors({**self.instance.parameters(), **frozen}, self._finished.dtypes)
        save_finished(directory, self._parts, self._finished, self.config, parameters)


_NAMES = {
    "f32": ("float32", "F32"),
    "bf16": ("bfloat16", "BF16"),
    "f16": ("float16", "F16"),
}  # in config.json and in safetensors


def finished_model(config: TrainConfig, tokenizer: Tokenizer, weights: StoredWeights | None) -> FinishedModel:
    """The files of a run's finished model, or of its finished adapter, besides its parameters.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of a new model. A model that training starts from keeps its own
            tokenizer files.
        weights: weights of the model that training starts from; None for a new model. The finished
            weights have the same dtypes unless `output.dtype` is set.

    Raises:
        CheckpointError: a file of the model that training starts from cannot be read.
    """
    requested = config.output.dtype
    in_config, in_weights = _NAMES[requested or "f32"]
    if config.lora is not None:
        assert config.model.path is not None
        return trained_parts(config).finished(config.model.path, in_weights)
    if config.model.path is None or weights is None:
        model = make_model_config(config)
        content = {**model.to_dict(), "torch_dtype": in_config}
        tokens = {name: content[name] for name in ("bos_token_id", "eos_token_id")}
        names = (name for name, _ in models.parameter_shapes(model))
        return FinishedModel(model_files(content, tokenizer, tokens), dict.fromkeys(names, in_weights))
    if requested is None:
        dtypes = {name: dtype_name(tensor.dtype) for name, tensor in weights.items()}
        return FinishedModel(model_files(copy_from=config.model.path), dtypes)
    content = models.config_content(config.model.path)
    keys = [key for key in ("dtype", "torch_dtype") if key in content] or ["torch_dtype"]
    files = model_files({**content, **dict.fromkeys(keys, in_config)}, copy_from=config.model.path)
    return FinishedModel(files, dict.fromkeys(weights, in_weights))


def _finite_means(figures: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Means of the figures about rewards that are finite."""
    means = {name: float(values.mean()) for name, values in figures.items() if name != "loss"}
    return {name: value for name, value in means.items() if np.isfinite(value)}


def rate_of(config: TrainConfig, number: int) -> float:
    """The learning rate of step `number`."""
    return config.optimizer.rate(number, config.train.steps)


def _num_tokens(batch: Mapping[str, NDArray[Any]], padding: int) -> int:
    """The tokens of a batch up to the last one of each sequence that is not padding."""
    is_used = (batch["tokens"] != padding) | (batch["labels"] != IGNORED)
    return int((is_used * np.arange(1, is_used.shape[1] + 1)).max(1).sum())


def _is_finite(tensor: NDArray[Any] | PartedTensor) -> bool:
    """Whether all values are finite; parts are read one at a time."""
    arrays = (part.values for part in tensor.parts) if isinstance(tensor, PartedTensor) else [tensor]
    return all(bool(np.isfinite(np.asarray(array)).all()) for array in arrays)
