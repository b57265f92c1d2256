"""The configuration of a training run: a TOML file, and settings of the command line that override it.

The configuration is checked as a whole before any work. Every key must be known, and its value must
have the right type (nothing is converted: `true` is not a number of steps) and lie in its range.
The error for a wrong key or value is one line that names it. This module makes the model's
configuration, the strategy with its mesh, and the optimizer from the sections; no other module of
`train` reads settings.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from tilewise import models, optim
from tilewise.checkpoint.training import RENAMED_SETTINGS
from tilewise.core import MODEL_DTYPES, ConfigError, LayoutError, PlanError, Validator, model_dtype
from tilewise.core.dims import MAX_SIZE
from tilewise.core.dtypes import MAX_F32
from tilewise.core.log import warn_once
from tilewise.core.mesh import DeviceMesh
from tilewise.core.validation import nearest, shown
from tilewise.files.reading import Unreadable, decode_text, first_problem, read_whole
from tilewise.graph import Recomputation
from tilewise.models import ModelConfig
from tilewise.nn import PreferenceLoss
from tilewise.plan.settings import MAX_ROWS_PER_TILE
from tilewise.strategy import (
    DistributionStrategy,
    PipelineStages,
    StateSharding,
    check_offload,
    microbatches_for,
    read_actions,
)
from tilewise.train.data_sections import SEQUENCE_KEYS, DataSection, DataSource, merge_sequences
from tilewise.train.lora_section import LoraSection
from tilewise.train.schedule import (
    SCHEDULERS,
    check_scheduler,
    learning_rate,
    scheduled_rate,
    warmup_of,
)
from tilewise.train.section import FilePath as _Path
from tilewise.train.section import Section as _Section
from tilewise.train.section import WrongValue as _WrongValue

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from tilewise.optim import Optimizer

__all__ = [
    "ABOUT_SHARDING",
    "DataSection",
    "DistributionSection",
    "DpoSection",
    "ModelSection",
    "OptimizerSection",
    "OutputSection",
    "TrainConfig",
    "TrainSection",
    "check_config",
    "is_changeable",
    "load_config",
    "make_model_config",
    "make_optimizer",
    "make_strategy",
    "setting_names",
    "with_steps_of_epochs",
]


_validate = Validator("train")
_MAX_AXIS = 1024
_MAX_TOKENS_PER_STEP = 1 << 24
_MAX_WORKERS = 255  # tasks::Embedded::kMaxWorkers
_MAX_FILE_BYTES = 1 << 16
_LEAST_VOCABULARY = 257
_MAX_LINE_CHARS = 4096  # TOML's parser takes a time that is quadratic in the length of a dotted key


def _one_spelling(name: str) -> str:
    """`bf16` or `f32` for any spelling of the two."""
    if name not in MODEL_DTYPES:
        raise ValueError(f"must be one of {', '.join(MODEL_DTYPES)}, got {shown(name)}")
    return model_dtype(name)


class ModelSection(_Section):
    """`[model]`: the model to train. Besides the attributes, it has the keys of the model family,
    as in Hugging Face's config.json. Their defaults give a small model.

    Attributes:
        model_type: the family of a new model.
        path: a model directory with weights and tokenizer from which training starts. It determines
            all other keys.
        ignore_config_fields: fields of that directory's config.json to ignore (`models.open`).
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model_type: str = "llama"
    path: _Path | None = None
    ignore_config_fields: tuple[str, ...] = ()

    @field_validator("ignore_config_fields", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        """Converts TOML's lists to tuples."""
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        others = [*self.model_fields_set - {"path", "ignore_config_fields"}, *(self.model_extra or {})]
        if self.path is not None and others:
            raise ValueError(f"model.path excludes other settings of the model, got {shown(min(others))}")
        return self


_MOST_DEFAULT_SPLITS = 8


class TrainSection(_Section):
    """`[train]`: length, batch and precision. One step processes `batch` sequences, or pairs of
    them if the data are pairs, on any number of devices. `recompute` (a word, or patterns of
    names), `offload` (a word or several) and `rows_per_tile` (a number) are as in
    `ComputeGraph.plan`. The held-out text is evaluated after every `evaluate_every` steps, or only
    at the end if this is 0. `freeze` has patterns of parameters that are not trained.
    `batch_splits` must divide `batch`. Its default is the largest power of
    two up to 8 that divides `batch`.

    Attributes:
        epochs: length of the run as passes over the data, instead of `steps`. The number of steps is
            known when the data is read (`with_steps_of_epochs`).
        load_best_model_at_end: the finished model has the weights of the evaluation with the lowest
            loss.
        early_stopping_patience: end the run after so many evaluations in a row that did not lower the
            lowest loss by more than `early_stopping_threshold`; 0 for never.
    """

    steps: int = Field(default=500, ge=1, le=10**9)
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    batch: int = Field(default=8, ge=1, le=1 << 16)
    accumulation: int = Field(default=1, ge=1, le=1 << 16)
    batch_splits: int = Field(default=_MOST_DEFAULT_SPLITS, ge=1, le=1 << 16)
    recompute: str | tuple[str, ...] = "none"
    offload: str | tuple[str, ...] = "none"
    rows_per_tile: int = Field(default=512, ge=1, le=MAX_ROWS_PER_TILE)
    dtype: str = "bf16"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    evaluate_every: int = Field(default=0, ge=0, le=10**9)
    load_best_model_at_end: bool = False
    early_stopping_patience: int = Field(default=0, ge=0, le=10**9)
    early_stopping_threshold: float = Field(default=0.0, ge=0, le=1e6)

    freeze: tuple[str, ...] = ()

    @field_validator("freeze", mode="before")
    @classmethod
    def _patterns(cls, value: object) -> object:
        """Converts TOML's lists to tuples."""
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise _WrongValue("train.epochs excludes train.steps", "remove one of the two")
        watches = self.load_best_model_at_end or self.early_stopping_patience
        if watches and not self.evaluate_every:
            name = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
            raise _WrongValue(f"train.{name} needs evaluations", "set train.evaluate_every")
        return self

    @model_validator(mode="before")
    @classmethod
    def _splits_of_batch(cls, values: object) -> object:
        """The default of `batch_splits`, which depends on the batch."""
        batch = values.get("batch") if isinstance(values, dict) else None
        if type(batch) is not int or batch < 1 or "batch_splits" in values:  # type: ignore[operator]  # checked above
            return values
        return {**values, "batch_splits": min(_MOST_DEFAULT_SPLITS, batch & -batch)}  # type: ignore[dict-item]

    @field_validator("recompute", mode="before")
    @classmethod
    def _words_or_patterns(cls, value: object) -> object:
        """Check for the types that a plan accepts. The plan itself checks whether patterns match a
        name.
        """
        try:
            Recomputation.of(value)
        except PlanError as error:
            raise ValueError(str(error).partition("] ")[2]) from None
        return value if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]  # checked by Recomputation.of

    @field_validator("offload", mode="before")
    @classmethod
    def _known_kinds(cls, value: object) -> object:
        """Check for the kinds that a plan accepts."""
        try:
            check_offload(value)  # type: ignore[arg-type]
        except PlanError as error:
            raise ValueError(str(error).partition("] ")[2]) from None
        return value if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]  # checked by check_offload

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, name: str) -> str:
        """One spelling per dtype, so that two spellings are the same run."""
        return _one_spelling(name)


_ADAMW_LR = 3e-3
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}  # classes of `tilewise.optim`


class OptimizerSection(_Section):
    """`[optimizer]`: the optimizer, its hyperparameters, and the schedule of the learning rate.

    Attributes:
        name: the optimizer.
        schedule: how the learning rate continues after the linear warm-up. `constant` keeps it;
            `linear` and `cosine` decay to `min_lr_ratio` times `lr` at the last step.
        lr_scheduler_type: a scheduler of transformers, with its values, instead of `schedule` and
            `min_lr_ratio`.
        lr_scheduler_kwargs: settings of this scheduler, by transformers' names.
        lr: the highest learning rate. AdamW has a default; other optimizers need a value.
        warmup_steps: steps of the warm-up; by default 50, and 0 with `lr_scheduler_type`.
        warmup_ratio: share of the run's steps that the warm-up takes, instead of `warmup_steps`.
        beta1, beta2, eps, momentum, nesterov, weight_decay, max_grad_norm: hyperparameters as in
            `tilewise.optim`; None for the default of the optimizer's class. A hyperparameter that
            the optimizer does not have is an error.
    """

    name: Literal["adamw", "sgd", "lion"] = "adamw"
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    lr: float = Field(default=_ADAMW_LR, gt=0, le=MAX_F32)
    warmup_steps: int = Field(default=50, ge=0, le=10**9)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    lr_scheduler_type: str | None = None
    lr_scheduler_kwargs: dict[str, int | float | str] = Field(default_factory=dict)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    beta1: float | None = Field(default=None, ge=0, lt=1)
    beta2: float | None = Field(default=None, ge=0, lt=1)
    eps: float | None = Field(default=None, gt=0)
    momentum: float | None = Field(default=None, ge=0, lt=1)
    nesterov: bool | None = None
    weight_decay: float | None = Field(default=None, ge=0)
    max_grad_norm: float | None = Field(default=None, ge=0)

    @field_validator("lr_scheduler_type")
    @classmethod
    def _known_scheduler(cls, name: str | None) -> str | None:
        if name is None or name in SCHEDULERS:
            return name
        suggestion = nearest(name, SCHEDULERS)
        advice = f"did you mean {suggestion}?" if suggestion else "choose one"
        if name in ("reduce_lr_on_plateau", "greedy"):
            advice = "its rate depends on evaluations, which a schedule must not; choose another"
        raise _WrongValue(f"must be one of {', '.join(SCHEDULERS)}, got {shown(name)}", advice)

    @model_validator(mode="before")
    @classmethod
    def _one_warmup(cls, values: object) -> object:
        """The default of `warmup_steps`, which depends on the schedule."""
        if not isinstance(values, dict) or values.get("lr_scheduler_type") is None:
            return values
        return {"warmup_steps": 0, **values}

    @model_validator(mode="after")
    def _one_schedule(self) -> OptimizerSection:
        chosen = self.model_fields_set
        if self.lr_scheduler_type is None:
            if self.warmup_ratio is not None and "warmup_steps" in chosen:
                raise _WrongValue(
                    "optimizer.warmup_ratio excludes optimizer.warmup_steps", "remove one of the two"
                )
            if self.lr_scheduler_kwargs:
                raise _WrongValue(
                    "optimizer.lr_scheduler_kwargs needs optimizer.lr_scheduler_type", "set both, or neither"
                )
            return self
        if self.warmup_ratio is not None and self.warmup_steps:
            raise _WrongValue(
                "optimizer.warmup_ratio excludes optimizer.warmup_steps", "remove one of the two"
            )
        other = next((name for name in ("schedule", "min_lr_ratio") if name in chosen), None)
        if other is not None:
            raise _WrongValue(
                f"optimizer.lr_scheduler_type excludes optimizer.{other}", "remove one of the two"
            )
        try:
            check_scheduler(self.lr_scheduler_type, self.lr, self.lr_scheduler_kwargs)
        except ConfigError as error:
            raise ValueError(str(error).partition("] ")[2]) from None
        return self

    @model_validator(mode="after")
    def _settings_belong_to_optimizer(self) -> OptimizerSection:
        settings = _hyperparameters(self.name)
        odd = next((name for name in self.hyperparameters() if name not in settings), None)
        if odd is not None:
            raise ValueError(f"{self.name} has no setting {odd}; it has {', '.join(settings)}")
        if self.name != "adamw" and "lr" not in self.model_fields_set:
            rule = f"optimizer.lr has no default for {self.name} and must be set"
            raise _WrongValue(rule, "add lr to [optimizer], or --set optimizer.lr=VALUE to the command")
        return self

    def hyperparameters(self) -> dict[str, float]:
        """The hyperparameters that are set, by name."""
        return {name: value for name, value in self if name not in _OF_SCHEDULE and value is not None}

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step of a run with `num_steps` steps. `step` is 0 for the first."""
        warmup = self.warmup_steps if self.warmup_ratio is None else warmup_of(self.warmup_ratio, num_steps)
        if self.lr_scheduler_type is None:
            return learning_rate(step, num_steps, self.lr, warmup, self.min_lr_ratio, self.schedule)
        settings = self.lr_scheduler_kwargs
        return scheduled_rate(self.lr_scheduler_type, step, num_steps, self.lr, warmup, settings)


_LATER_KEYS = ("name", "schedule", "warmup_ratio", "lr_scheduler_type", "lr_scheduler_kwargs")
_OF_SCHEDULE = ("lr", "warmup_steps", "min_lr_ratio", *_LATER_KEYS)


def _hyperparameters(name: str) -> list[str]:
    """The settings of an optimizer's class."""
    return [f.name for f in fields(getattr(optim, _OPTIMIZERS[name])) if f.name != "groups"]


_MESHES: Mapping[str, Sequence[tuple[str, ...]]] = {
    "single": [()],
    "ddp": [("dp",)],
    "fsdp": [("fsdp",), ("dp", "fsdp")],
    "tensor_parallel": [("tp",)],
    "pipeline": [("pp",)],
    "hybrid": [
        ("dp", "tp"),
        ("fsdp", "tp"),
        ("dp", "fsdp", "tp"),
        *(
            ("pp", *others)
            for others in (("dp",), ("fsdp",), ("tp",), ("dp", "fsdp"), ("dp", "tp"), ("fsdp", "tp"))
        ),
        ("pp", "dp", "fsdp", "tp"),
    ],
}


ABOUT_SHARDING = ("reshard_after_forward", "prefetch", "reduce", "units", "unit_elements")
_ABOUT_STAGES = (
    "schedule",
    "schedule_file",
    "chunks",
    "layers",
    "first_stage_less_layers",
    "last_stage_less_layers",
)


class DistributionSection(_Section):
    """`[distribution]`: the strategy, its mesh, how axis `fsdp` shards state (`StateSharding`), and how
    layers are divided among the stages on axis `pp` (`PipelineStages`).

    Attributes:
        schedule_file: a schedule in PyTorch's CSV format, instead of `schedule`. A relative path in
            a file is relative to the file's own directory.
    """

    strategy: Literal["single", "ddp", "fsdp", "tensor_parallel", "pipeline", "hybrid"] = "single"
    mesh: dict[str, int] = Field(default_factory=dict)
    workers_per_device: int | None = Field(default=None, ge=1, le=_MAX_WORKERS)
    reshard_after_forward: bool = True
    prefetch: int = Field(default=1, ge=0, le=64)
    reduce: Literal["microbatch", "step"] = "microbatch"
    units: list[str] = Field(default_factory=list, max_length=1024)
    unit_elements: int = Field(default=0, ge=0, le=MAX_SIZE)
    schedule: str = "1f1b"
    schedule_file: _Path | None = None
    chunks: int | None = Field(default=None, ge=1, le=64)
    layers: list[int] | str | None = None
    first_stage_less_layers: int | None = Field(default=None, ge=0, le=MAX_SIZE)
    last_stage_less_layers: int | None = Field(default=None, ge=0, le=MAX_SIZE)

    @model_validator(mode="after")
    def _axes_belong_to_strategy(self) -> DistributionSection:
        possible = _MESHES[self.strategy]
        if set(self.mesh) not in [set(axes) for axes in possible]:
            names = " or ".join(", ".join(axes) or "no axis" for axes in possible)
            raise ValueError(f"the mesh of {self.strategy!r} must name {names}, got {self.mesh}")
        usual = DistributionSection.model_construct()
        about_sharding = [name for name in ABOUT_SHARDING if getattr(self, name) != getattr(usual, name)]
        if about_sharding and "fsdp" not in self.mesh:
            raise ValueError(f"{about_sharding[0]} needs axis fsdp in the mesh, got {self.mesh}")
        about_stages = [name for name in _ABOUT_STAGES if getattr(self, name) != getattr(usual, name)]
        if about_stages and "pp" not in self.mesh:
            raise ValueError(f"{about_stages[0]} needs axis pp in the mesh, got {self.mesh}")
        if self.schedule_file is not None and "schedule" in self.model_fields_set:
            raise ValueError(f"schedule_file needs schedule to be left out, got {self.schedule!r}")
        try:
            self.stages(self.schedule if self.schedule_file is None else _ANY_PASSES)
        except LayoutError as error:
            raise ValueError(str(error).partition("] ")[2]) from None
        if not all(1 <= size <= _MAX_AXIS for size in self.mesh.values()):
            raise ValueError(f"every axis of the mesh must lie in 1 to {_MAX_AXIS}, got {self.mesh}")
        return self

    def stages(self, schedule: Sequence[Sequence[str]] | str | None = None) -> PipelineStages:
        """How layers are divided.

        Args:
            schedule: the passes of each stage, from `schedule_file`.

        Raises:
            LayoutError: a value does not fit the others.
        """
        return PipelineStages(
            schedule=self.schedule if schedule is None else schedule,  # type: ignore[arg-type]
            chunks=self.chunks,
            layers=self.layers,  # type: ignore[arg-type]  # PipelineStages makes it a tuple
            first_stage_less_layers=self.first_stage_less_layers,
            last_stage_less_layers=self.last_stage_less_layers,
        )


_ANY_PASSES = (("0F0", "0B0"),)  # stand for those of a file that has not been read
_F16 = ("f16", "fp16", "float16")  # names of a dtype that weights are stored in, but no model computes in


class DpoSection(_Section):
    """`[dpo]`: the loss of a run on pairs, whose data have `type = "preference"`. Other runs have no such
    section; in a run on pairs it may be left out.

    Attributes:
        beta, loss_type, label_smoothing: see `nn.PreferenceLoss`.
    """

    beta: float = Field(default=0.1, ge=1e-6, le=1e6)
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)

    @model_validator(mode="after")
    def _loss_is_valid(self) -> DpoSection:
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise _WrongValue(
                f"dpo.label_smoothing needs loss_type = 'sigmoid', got {self.loss_type!r}", "remove it"
            )
        return self

    @property
    def loss(self) -> PreferenceLoss:
        """The loss of a graph."""
        return PreferenceLoss(self.beta, self.loss_type, self.label_smoothing)


class OutputSection(_Section):
    """`[output]`: where checkpoints, metrics, the loss curve and the finished model are written.

    A relative directory in a file is relative to the file's own directory.

    Attributes:
        directory: output directory of the run.
        dtype: dtype of the finished model's weights: `bf16`, `f32` or `f16`. None keeps the dtype
            of the model that training starts from; for a new model, None stands for fp32.
        checkpoint_every: steps between two checkpoints.
        keep_checkpoints: number of newest checkpoints to keep.
        checkpoint_in_background: copy the state and write it while training continues. Otherwise
            training waits until the checkpoint is written, and no memory is needed for the copy.
        offload_directory: directory of the files with offloaded tensors during the run; None for
            `directory`.
        report_to: `tensorboard` also writes the figures of `metrics.jsonl` as TensorBoard files.
    """

    directory: _Path = "runs/train"
    checkpoint_every: int = Field(default=100, ge=1, le=10**9)
    keep_checkpoints: int = Field(default=2, ge=1, le=10**9)
    checkpoint_in_background: bool = True
    offload_directory: _Path | None = None
    dtype: str | None = None
    report_to: Literal["none", "tensorboard"] = "none"

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, name: str | None) -> str | None:
        return "f16" if name in _F16 else None if name is None else _one_spelling(name)


class TrainConfig(_Section):
    """A whole configuration file."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    dpo: DpoSection | None = None
    distribution: DistributionSection = DistributionSection()
    output: OutputSection = OutputSection()
    lora: LoraSection | None = None

    @model_validator(mode="after")
    def _has_a_base(self) -> TrainConfig:
        name = "lora" if self.lora is not None else "train.freeze" if self.train.freeze else ""
        if name and self.model.path is None:
            rule = f"{name} needs model.path, because frozen weights are not written to checkpoints"
            raise _WrongValue(rule, "set model.path to the model that is tuned")
        if self.lora is not None and self.train.freeze:
            raise _WrongValue("lora freezes all weights of the model already", "remove train.freeze")
        return self

    @model_validator(mode="before")
    @classmethod
    def _sections_of_data(cls, values: object) -> object:
        """Puts `[sequences]` and a list of sources into one section."""
        return merge_sequences(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _microbatches_of_pipeline(self) -> TrainConfig:
        """The default of `train.accumulation`, which depends on the stages of a pipeline."""
        stages = self.distribution.mesh.get("pp", 1)
        if stages > 1 and "accumulation" not in self.train.model_fields_set:
            sharing = self.distribution.mesh.get("dp", 1) * self.distribution.mesh.get("fsdp", 1)
            number = microbatches_for(self.distribution.schedule, stages, self.train.batch_splits, sharing)
            object.__setattr__(self, "train", self.train.model_copy(update={"accumulation": number}))
        return self

    @model_validator(mode="after")
    def _batch_fits(self) -> TrainConfig:
        batch, batch_splits, context = self.train.batch, self.train.batch_splits, self.data.context
        if batch % batch_splits:
            rule = f"train.batch must divide by train.batch_splits, got {batch} over {batch_splits}"
            fitting = math.gcd(batch, batch_splits)
            advice = f"set train.batch_splits = {fitting}, or a batch that is a multiple of {batch_splits}"
            raise _WrongValue(rule, advice)
        if batch * context > _MAX_TOKENS_PER_STEP:
            raise ValueError(
                f"train.batch x data.context must be at most {_MAX_TOKENS_PER_STEP}, got {batch} x {context}"
            )
        if self.train.evaluate_every and not self.data.has_held_out:
            raise ValueError("train.evaluate_every needs held-out text, got data.held_out_percent = 0")
        return self

    @model_validator(mode="after")
    def _data_fits_model(self) -> TrainConfig:
        kinds = {"chat": "a chat template", "pretokenized": "a vocabulary"}
        odd = next((source.type for source in self.data.sources if source.type in kinds), None)
        if odd is not None and self.model.path is None:
            rule = f"data of type = {odd!r} needs a model with {kinds[odd]}, got no model.path"
            raise _WrongValue(rule, "set model.path to a model directory")
        return self

    @model_validator(mode="after")
    def _pairs_are_trained(self) -> TrainConfig:
        if not self.data.is_preference and self.dpo is not None:
            raise _WrongValue("dpo needs data of type = 'preference'", "set data.type, or remove [dpo]")
        if self.data.is_preference and self.model.path is None:
            raise _WrongValue("data of type = 'preference' needs model.path", "start from a trained model")
        if self.data.is_preference and not self.dpo:
            object.__setattr__(self, "dpo", DpoSection())
        return self

    @property
    def num_sequences(self) -> int:
        """Sequences of a step: `train.batch`, or twice as many if the data are pairs."""
        return self.train.batch * (2 if self.data.is_preference else 1)

    def what_must_match(self) -> dict[str, Any]:
        """The settings that determine the result, by section.

        Settings that do not change the result are omitted (output, distribution, accumulation,
        recomputation, offloading, tile size, evaluation). The data is compared by content
        (`DataSection.what_must_match`). Keys of `[optimizer]`, `train.freeze` and `lora` are omitted
        at their defaults where older checkpoints do not have them. `train.epochs` is omitted, because
        `train.steps` follows from it.
        """
        sections = self.model_dump(
            exclude={
                "model": True,
                "output": True,
                "distribution": True,
                "data": True,
                **({} if self.dpo else {"dpo": True}),
                "train": {*_WITHOUT_EFFECT},
                "optimizer": True,
                "lora": True,
            }
        )
        freeze = sections["train"].pop("freeze")
        if freeze:
            sections["train"]["freeze"] = [*freeze]
        if self.lora is not None:
            sections["lora"] = self.lora.settings()
        section, optimizer = self.optimizer, make_optimizer(self)
        settings = section.model_dump(include={"lr", "warmup_steps", "min_lr_ratio"})
        settings |= section.model_dump(include={*_LATER_KEYS}, exclude_defaults=True)
        settings |= {name: getattr(optimizer, name) for name in _hyperparameters(section.name)}
        model, data = make_model_config(self).to_dict(), self.data.what_must_match()
        return {"model": model, "data": data, **sections, "optimizer": settings}


_WITHOUT_EFFECT = (
    "epochs",
    "accumulation",
    "recompute",
    "offload",
    "rows_per_tile",
    "evaluate_every",
    "load_best_model_at_end",
    "early_stopping_patience",
    "early_stopping_threshold",
)  # keys of [train] that decide the result of no step
_CHANGEABLE = ("train.steps", "train.epochs", "train.on_nonfinite")


def is_changeable(key: str) -> bool:
    """Whether a resumed run may change a setting that determines its result.

    Args:
        key: `section.key`. Changeable are the number of steps, the handling of steps that are not
            finite, and the settings of the optimizer, but not the optimizer itself. The changeable
            settings affect neither the model and its state nor the order of the data.
    """
    return key in _CHANGEABLE or (key.startswith("optimizer.") and key != "optimizer.name")


def load_config(path: str | Path, settings: Sequence[str] = ()) -> TrainConfig:
    """Read and check a configuration file.

    Args:
        path: a TOML file; relative paths in it are relative to its own directory.
        settings: strings `SECTION.KEY=VALUE` that override the file. VALUE is TOML, or a string
            without quotes; relative paths are relative to the file's directory, too. A key also
            replaces the keys that exclude it, as `train.steps` replaces `train.epochs`.

    Raises:
        ConfigError: there is no such file, the file is not TOML, or a key or value is wrong. The
            message names the place.
    """
    path = _validate.path("load_config", "a configuration", path)
    try:
        content = _parse_toml(decode_text(read_whole(path, _MAX_FILE_BYTES)))
    except Unreadable as error:
        raise ConfigError(
            f"[train.load_config] the configuration must be a readable TOML file; got {str(path)!r}: {error}; "
            "check the path, or repair it"
        ) from None
    for name, text in map(_split_setting, settings):
        section, _, key = name.partition(".")
        table = content.setdefault(section, {})
        if isinstance(table, list):
            _validate.invalid(
                "config",
                f"--set {section}.KEY needs one [{section}] table",
                f"{len(table)} in [[{section}]]",
                "change the file; what concerns all sources is in [sequences]",
            )
        if isinstance(table, dict):  # otherwise the check below rejects the section
            table[key] = _parse_value(text)
            for other in _INSTEAD.get(name, ()):
                table.pop(other, None)
    where = f"{str(path)!r} and --set" if settings else repr(str(path))
    config = _with_paths_from(check_config(content, where), path.parent)
    make_model_config(config)
    return config


_INSTEAD = {
    "train.steps": ("epochs",),
    "train.epochs": ("steps",),
    "optimizer.warmup_steps": ("warmup_ratio",),
    "optimizer.warmup_ratio": ("warmup_steps",),
    "optimizer.schedule": ("lr_scheduler_type", "lr_scheduler_kwargs"),
    "optimizer.lr_scheduler_type": ("schedule", "min_lr_ratio"),
}  # keys of the same section that a key excludes
_SETTING = re.compile(r"\s*(\w+\.\w+)\s*=(.*)", re.DOTALL)


def setting_names(settings: Sequence[str]) -> frozenset[str]:
    """The names `section.key` of settings from the command line. Raises the errors of
    `load_config`.
    """
    return frozenset(name for name, _ in map(_split_setting, settings))


def _split_setting(text: str) -> tuple[str, str]:
    match = _SETTING.fullmatch(text)
    if match is None:
        _validate.invalid("config", "--set must be SECTION.KEY=VALUE", shown(text), "write train.steps=4000")
    return match[1], match[2].strip()


def _parse_value(text: str) -> object:
    """A TOML value, or the text itself if it is not TOML."""
    try:
        table = _parse_toml(f"value = {text}")
    except Unreadable:
        return text
    return table["value"] if len(table) == 1 else text


def check_config(content: Mapping[str, Any], where: str) -> TrainConfig:
    """The configuration that sections describe.

    Args:
        where: the source of the sections, for messages.

    Raises:
        ConfigError: a key or value is wrong. The message names its place.
    """
    content = _with_new_names(_validate.mapping("config", "a configuration", content, "sections"))
    try:
        return TrainConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = _place_of_source(first_problem(error), content.get("data"))
        raise ConfigError(f"[train.config] {text} in {where}; {_advice(first)}") from None


def _place_of_source(text: str, data: object) -> str:
    """An error with the name of a source as in the file: `data` for a table, `data[0]` in a list."""
    is_table = isinstance(data, Mapping) and "sources" not in data
    return re.sub(r"\bdata\.sources\.(\d+)\b", "data" if is_table else r"data[\1]", text)


def _advice(error: ErrorDetails) -> str:
    """Advice about an error of pydantic's."""
    near = None
    if error["type"] == "extra_forbidden":
        near = _nearest_key(*(str(part) for part in error["loc"] if part != "sources" and type(part) is str))
    elif error["type"] == "literal_error" and isinstance(error["input"], str):
        near = nearest(error["input"], re.findall(r"'(\w+)'", error["ctx"]["expected"]))
    if near is not None:
        return f"did you mean {near}?"
    wrong = error.get("ctx", {}).get("error")
    return wrong.advice if isinstance(wrong, _WrongValue) else "correct it"


def _with_new_names(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sections, with keys of earlier versions under their new names. Warns once about each such
    key.
    """
    for old, new in RENAMED_SETTINGS.items():
        section, _, key = old.partition(".")
        table = content.get(section)
        if isinstance(table, Mapping) and key in table:
            warn_once("train", f"{old} is now called {new}: rename it in the configuration")
            renamed = {new.partition(".")[2] if name == key else name: value for name, value in table.items()}
            content = {**content, section: renamed}
    return content


def _nearest_key(section: str, key: str | None = None) -> str | None:
    """The known section or key that is most similar to an unknown one; None if none is similar. The
    section of the unknown key is searched first, then all sections.

    Args:
        section: section of the unknown key, or the unknown name at the top of the file.
        key: None for an unknown name at the top of the file.
    """
    keys_of_section = _keys_of_sections()
    if key is None:
        if near := nearest(section, keys_of_section):
            return f"[{near}]"
        section, key = "", section
    if (place := _place_of_key(key)) is not None:
        return place
    if near := nearest(key, keys_of_section.get(section, ())):
        return f"{section}.{near}"
    near = nearest(key, [name for names in keys_of_section.values() for name in names])
    return None if near is None else _place_of_key(near)


def _place_of_key(key: str) -> str | None:
    """The name `section.key` of a key in any section; None for an unknown one."""
    return next((f"{name}.{key}" for name, keys in _keys_of_sections().items() if key in keys), None)


def _keys_of_sections() -> dict[str, list[str]]:
    """The keys of each section, as in a file."""
    keys = {name: [*section.model_fields] for name, section in _sections().items()}
    return {**keys, "data": [*DataSource.model_fields, *SEQUENCE_KEYS], "sequences": [*SEQUENCE_KEYS]}


def _sections() -> Mapping[str, type[_Section]]:
    """The class of every section, by name."""
    return {name: type(value) for name, value in TrainConfig()} | {"dpo": DpoSection, "lora": LoraSection}


_MISSPELLED = 0.87  # similarity above which a key of [model] is a misspelled one; real keys are less similar
# Default sizes of a new model: those of the demo.
_SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def make_model_config(config: TrainConfig) -> ModelConfig:
    """The model's configuration. In a new model, `<|endoftext|>` has id 0 and both starts and ends
    a document.

    Raises:
        ConfigError: sizes do not fit together, a key is unknown, or there is no model at
            `model.path`.
    """
    if config.model.path is not None:
        return models.open(config.model.path, ignore=config.model.ignore_config_fields)
    family = models.FAMILIES.get(config.model.model_type)
    if family is None:
        _validate.invalid(
            "config",
            f"model.model_type must be one of {', '.join(models.FAMILIES)}",
            shown(config.model.model_type),
            "choose one",
        )
    field_names = {field.name for field in fields(family.config)}
    defaults = {
        **_SMALL,
        "max_position_embeddings": config.data.context,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    defaults = {
        family.config.spelled(name): value
        for name, value in defaults.items()
        if name in field_names or name == "eos_token_id"
    }
    extra = config.model.model_extra or {}
    token_key = next((key for key in ("bos_token_id", "eos_token_id") if key in extra), None)
    if token_key is not None:
        _validate.invalid(
            "config",
            "model must not have this key, because a new tokenizer begins and ends documents with id 0",
            f"{token_key} = {shown(extra[token_key])}",
            "remove it",
        )
    spelled = [family.config.spelled(name).replace("eos_token_ids", "eos_token_id") for name in field_names]
    for key in (key for key in extra if key not in spelled):
        near = nearest(key, spelled, _MISSPELLED)
        place = f"model.{near}" if near else _place_of_key(key)
        if place is not None:
            _validate.invalid(
                "config",
                "keys of model must be those of its family",
                f"model.{key}",
                f"did you mean {place}?",
            )
    content = {**defaults, **extra, "model_type": family.name}
    model = models.config_from_dict(content, only_known=True)
    if model.vocab_size < _LEAST_VOCABULARY:
        _validate.invalid(
            "config",
            f"model.vocab_size must be at least {_LEAST_VOCABULARY}, for 256 bytes and the special tokens",
            str(model.vocab_size),
            "choose a larger one",
        )
    return model


def with_steps_of_epochs(config: TrainConfig, num_windows: int) -> TrainConfig:
    """The configuration with the number of steps that `train.epochs` stands for.

    Args:
        num_windows: sequences of one pass over the training data.
    """
    train = config.train
    if train.epochs is None:
        return config
    steps = max(1, math.ceil(train.epochs * num_windows / train.batch))
    return config.model_copy(update={"train": train.model_copy(update={"steps": steps})})


def make_optimizer(config: TrainConfig) -> Optimizer:
    """The optimizer of `[optimizer]`, for the graph's `optimize`.

    Raises:
        ConfigError: a value is beyond fp32.
    """
    make = getattr(optim, _OPTIMIZERS[config.optimizer.name])
    optimizer: Optimizer = make(**config.optimizer.hyperparameters())
    return optimizer


def make_strategy(config: TrainConfig, mesh: DeviceMesh | None = None) -> DistributionStrategy:
    """The strategy of `[distribution]`, over the section's mesh or the given one.

    Raises:
        LayoutError: the file of a schedule cannot be read, or is not one.
    """
    section = config.distribution
    sharding = StateSharding(
        ("fsdp",),
        section.reshard_after_forward,
        section.prefetch,
        section.reduce,
        tuple(section.units),
        section.unit_elements,
    )
    passes = None if section.schedule_file is None else read_actions(section.schedule_file)
    mesh = DeviceMesh(section.mesh) if mesh is None else mesh
    return DistributionStrategy.for_mesh(mesh, sharding, section.stages(passes))


def _parse_toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    longest = max(map(len, text.split("\n")))
    if longest > _MAX_LINE_CHARS:
        raise Unreadable(f"a line has {longest} characters, more than {_MAX_LINE_CHARS}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not TOML: {error}") from None


def _with_paths_from(config: TrainConfig, directory: Path) -> TrainConfig:
    """Join relative paths in a configuration to the directory of its file. Absolute paths do not
    change.
    """
    paths = {"directory": str(directory / config.output.directory)}
    if config.output.offload_directory is not None:
        paths["offload_directory"] = str(directory / config.output.offload_directory)
    output = config.output.model_copy(update=paths)
    config = config.model_copy(update={"output": output})
    if config.model.path is not None:
        model = config.model.model_copy(update={"path": str(directory / config.model.path)})
        config = config.model_copy(update={"model": model})
    if config.lora is not None and config.lora.path is not None:
        lora = config.lora.model_copy(update={"path": str(directory / config.lora.path)})
        config = config.model_copy(update={"lora": lora})
    if config.distribution.schedule_file is not None:
        path = str(directory / config.distribution.schedule_file)
        distribution = config.distribution.model_copy(update={"schedule_file": path})
        config = config.model_copy(update={"distribution": distribution})
        if "accumulation" not in config.train.model_fields_set:
            number = distribution.stages(read_actions(path)).microbatches
            train = config.train.model_copy(update={"accumulation": number})
            config = config.model_copy(update={"train": train})
    return config.model_copy(update={"data": config.data.with_paths_from(directory)})
