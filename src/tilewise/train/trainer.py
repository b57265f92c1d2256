"""`Trainer`: a model in training, with its plan, its instance and its data.

The trainer owns the instance and closes it. The batch and the learning rate of a step depend only
on the step's number. So measuring, evaluating, interrupting and resuming do not change the result.
Trained weights are written as a Hugging Face directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise import models
from tilewise.checkpoint import (
    CheckpointWriter,
    ConfigChange,
    FinishedModel,
    PartedTensor,
    StoredWeights,
    TrainingState,
    cast_tensors,
    check_token_ids,
    load_tokenizer,
    model_files,
    save_checkpoint,
)
from tilewise.checkpoint.header import dtype_name
from tilewise.core import ConfigError, LayoutError, NotFinite, TilewiseError, get_logger
from tilewise.core.dims import Dim
from tilewise.core.progress import Progress
from tilewise.core.tree import allowed_widths
from tilewise.data import (
    END_OF_TEXT,
    IGNORED,
    MASK,
    Batches,
    Corpus,
    MaskedBatches,
    PaddedBatches,
    encode_files,
    load_corpus,
    load_standard_library,
    special_id,
    train_tokenizer,
)
from tilewise.files.writing import writing
from tilewise.train.evaluation import score_files
from tilewise.train.progress import track_work
from tilewise.train.schedule import learning_rate
from tilewise.train.train_config import TrainConfig, make_model_config, make_optimizer, make_strategy
from tilewise.train.trained_parts import frozen_digest, opened_finished, save_finished, trained_parts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from tokenizers import Tokenizer

    from tilewise.session import ComputeGraph, GraphInstance, Plan, StepResult

__all__ = [
    "Trainer",
    "TrainingData",
    "evaluate_model",
    "finished_model",
    "make_graph",
    "make_plan",
    "prepare_data",
    "rate_of",
]

MOST_SKIPPED = 10  # consecutive steps; after so many the weights are probably unusable


@dataclass(frozen=True)
class TrainingData:
    """The data of a training run.

    Attributes:
        corpus: the files.
        tokenizer: the model's tokenizer.
        batches: batches of the training files. The number of a step gives its batch.
        end: the id that ends a file.
        digest: SHA-256 of the training files' token stream.
        held_out: batches of the held-out files; None if training does not evaluate them.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    batches: Batches | MaskedBatches
    end: int
    digest: str
    held_out: Batches | MaskedBatches | None = None


def prepare_data(config: TrainConfig, console: Console) -> TrainingData:
    """Read the corpus and encode its texts. The tokenizer is trained on the corpus, or loaded from
    the model that training starts from.

    Args:
        config: configuration of the run.
        console: shows progress.

    Raises:
        ConfigError: there is no text at the configured path, or not enough.
        CheckpointError: there is no tokenizer in the directory that training starts from.
    """
    percent = config.data.held_out_percent
    is_stdlib = config.data.path == "stdlib"
    corpus = load_standard_library(percent) if is_stdlib else load_corpus(config.data.path, percent)
    model = make_model_config(config)
    is_encoder = models.is_encoder(model)
    if config.model.path is not None:
        tokenizer = load_tokenizer(config.model.path, model.vocab_size)
    else:
        special = (END_OF_TEXT, MASK) if is_encoder else (END_OF_TEXT,)
        texts = (file.text for file in corpus.train)
        tokenizer = train_tokenizer(texts, model.vocab_size, special_tokens=special)
    end = (
        model.eos_token_ids[0] if model.eos_token_ids else special_id(tokenizer, END_OF_TEXT, "[SEP]", "</s>")
    )
    mask = special_id(tokenizer, MASK, "<mask>") if is_encoder else None

    def cut(stream: NDArray[np.int32]) -> Batches | MaskedBatches:
        parts = (stream, config.train.batch, config.data.context, config.train.seed)
        windows = PaddedBatches(*parts, end) if config.data.is_padded else Batches(*parts)
        if mask is None:
            return windows
        return MaskedBatches(windows, mask, model.vocab_size, config.data.masked_percent)

    with track_work(console, "encoding") as progress:
        stream = encode_files(tokenizer, [file.text for file in corpus.train], end, progress.show)
    beyond = stream[stream >= model.vocab_size][:1].tolist()
    check_token_ids(tokenizer, beyond, model.vocab_size, "the training data")
    batches, held_out = cut(stream), None
    if config.train.evaluate_every:
        held_out_stream = encode_files(tokenizer, [file.text for file in corpus.held_out], end)
        try:
            held_out = cut(held_out_stream)
        except ConfigError:
            raise ConfigError(
                f"[train.data] train.evaluate_every needs at least {config.data.context + 1} tokens of held-out text; "
                f"got {len(held_out_stream)} in {len(corpus.held_out)} files; raise data.held_out_percent, or give "
                "more text"
            ) from None
    digest = hashlib.sha256(stream.tobytes()).hexdigest()
    return TrainingData(corpus, tokenizer, batches, end, digest, held_out)


def make_graph(config: TrainConfig, *, is_padded: bool) -> ComputeGraph:
    """The training graph with its loss, without optimizer and strategy.

    Args:
        is_padded: whether each step has its own length, up to the context.
    """
    from tilewise.session import ComputeGraph  # imports the native module

    model, train, parts = make_model_config(config), config.train, trained_parts(config)
    graph = ComputeGraph(model.model_type, adapters=parts.adapters)
    context = config.data.context
    length = Dim("seq", 1, context) if is_padded else context
    models.build_training_graph(graph, model, train.batch, length, train.dtype)
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
    graph = make_graph(config, is_padded=config.data.is_padded)
    graph.optimize(make_optimizer(config))
    graph.set_distribution(make_strategy(config))
    try:
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
        num_tokens: tokens that the last step predicted, without padding.
        changes: changes of the configuration since the run began. Checkpoints record them.

    Raises:
        ResourceError: the plan needs more memory than available.
    """

    def __init__(self, config: TrainConfig, data: TrainingData, graph: ComputeGraph, plan: Plan) -> None:
        self.config = config
        self.data = data
        self.num_tokens = 0
        self.changes: Sequence[ConfigChange] = ()
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
        self._writer.check()
        is_last_chance = self._num_skipped + 1 >= MOST_SKIPPED
        on_nonfinite = "stop" if is_last_chance else self.config.train.on_nonfinite
        batch = self.data.batches.at(number)
        result = self.instance.step(batch, lr=rate_of(self.config, number), on_nonfinite=on_nonfinite)
        self._num_skipped = self._num_skipped + 1 if result.is_skipped else 0
        self.num_tokens = int((batch["labels"] != IGNORED).sum())
        return result

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
        """The mean loss over the held-out windows, in nats per predicted token.

        This runs the forward pass of the trainer's instance, so it needs no second copy of the
        weights. It changes neither weights nor optimizer states. Windows are formed as in training:
        the last tokens of packed text are not used if they do not fill a window.
        """
        held_out = self.data.held_out
        assert held_out is not None  # read if the configuration evaluates
        windows = held_out.batches if isinstance(held_out, MaskedBatches) else held_out
        nats, num_tokens = 0.0, 0
        for number in range(-(-windows.num_windows // windows.batch)):
            batch = held_out.at(number)
            batch["labels"][windows.num_windows - number * windows.batch :] = (
                IGNORED  # these windows belong to the next epoch
            )
            counted = int((batch["labels"] != IGNORED).sum())
            if counted:
                self.instance.forward(**batch)
                nats += float(self.instance.get_tensor("loss").reshape(())) * counted
                num_tokens += counted
        return nats / max(num_tokens, 1)

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
        state = TrainingState(num_steps, tensors, self._finished, axes, self.changes)
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


def rate_of(config: TrainConfig, number: int) -> float:
    """The learning rate of step `number`."""
    section = config.optimizer
    return learning_rate(
        number, config.train.steps, section.lr, section.warmup_steps, section.min_lr_ratio, section.schedule
    )


def _is_finite(tensor: NDArray[Any] | PartedTensor) -> bool:
    """Whether all values are finite; parts are read one at a time."""
    arrays = (part.values for part in tensor.parts) if isinstance(tensor, PartedTensor) else [tensor]
    return all(bool(np.isfinite(np.asarray(array)).all()) for array in arrays)
