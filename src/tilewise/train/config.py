"""The configuration of a training run: a TOML file, checked as a whole before any work.

Every key is known, typed (nothing is coerced: `true` is no number of steps) and bounded (far above what one machine can
hold, so that a slip is refused before memory is touched); a wrong one is one line that says where it stands and what is
wrong with it. Turns into a model's configuration, a strategy with its mesh, and an optimizer; nothing else in `train`
reads files of settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    field_validator,
    model_validator,
)

import tilewise as tw
from tilewise import models
from tilewise.core import MODEL_DTYPES, Border, ConfigError, PlanError, model_dtype
from tilewise.core.border import shown
from tilewise.core.dims import MAX_SIZE
from tilewise.core.dtypes import MAX_F32
from tilewise.core.mesh import DeviceMesh
from tilewise.core.reading import Unreadable, decode_text, first_problem, read_whole
from tilewise.graph import Recomputation
from tilewise.models import ModelConfig
from tilewise.plan.settings import MAX_ROWS_PER_TILE
from tilewise.strategy import check_offload

if TYPE_CHECKING:
    from tilewise import DistributionStrategy
    from tilewise.optim import AdamW

__all__ = [
    "DataSection",
    "DistributionSection",
    "ModelSection",
    "OptimizerSection",
    "OutputSection",
    "TrainConfig",
    "TrainSection",
    "check_config",
    "load_config",
    "make_model_config",
    "make_optimizer",
    "make_strategy",
]


_border = Border("train")
_MAX_AXIS = 1024
_MAX_TOKENS_PER_STEP = 1 << 24
_MAX_WORKERS = 255  # tasks::Embedded::kMaxWorkers
_MAX_FILE_BYTES = 1 << 16
_LEAST_VOCABULARY = 257
_MAX_LINE_CHARS = 4096  # TOML's parser takes a time that is quadratic in the length of a dotted key


def _named(path: str) -> str:
    if not path:
        raise ValueError("must not be empty")
    if "\0" in path:
        raise ValueError("must be a path, which holds no zero byte")
    return path


# Names of files are bytes to the system, so also those that are not UTF-8 are taken as they come.
_Path = Annotated[InstanceOf[str], AfterValidator(_named)]


def _one_spelling(name: str) -> str:
    """`bf16` or `f32` for any spelling of the two."""
    if name not in MODEL_DTYPES:
        raise ValueError(f"must be one of {', '.join(MODEL_DTYPES)}, got {shown(name)}")
    return model_dtype(name)


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """`[model]`: what is trained. Other keys than these are the family's own, as in Hugging Face's config.json; without
    them the model is small.

    Attributes:
        model_type: the family of a new model.
        path: a model directory whose weights and tokenizer training starts from; it says everything else.
        ignore_config_fields: fields of that directory's config.json that are left aside (`models.open`).
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model_type: str = "llama"
    path: _Path | None = None
    ignore_config_fields: tuple[str, ...] = ()

    @field_validator("ignore_config_fields", mode="before")
    @classmethod
    def _names(cls, given: object) -> object:
        """TOML has lists."""
        return tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        others = [*self.model_fields_set - {"path", "ignore_config_fields"}, *(self.model_extra or {})]
        if self.path is not None and others:
            raise ValueError(
                f"a model that starts from path has no settings of its own, got {shown(min(others))}"
            )
        return self


class DataSection(_Section):
    """`[data]`: text to learn from. `path` is a file, a directory, or `stdlib` for this Python's own
    sources. `documents` says how they become sequences: `packed` one after the other, so that every sequence has
    `context` tokens, or `padded`, each in a sequence of its own, which is as long as the longest of its batch.
    `masked_percent` is of the tokens that an encoder learns to predict."""

    path: _Path = "stdlib"
    held_out_percent: float = Field(default=5.0, ge=0, lt=100)
    context: int = Field(default=256, ge=8, le=1 << 17)
    documents: Literal["packed", "padded"] = "packed"
    masked_percent: float = Field(default=15.0, gt=0, lt=100)

    @property
    def is_padded(self) -> bool:
        """Whether sequences are of different lengths."""
        return self.documents == "padded"


class TrainSection(_Section):
    """`[train]`: length, batch and precision. One step sees `batch` sequences, whatever the devices. `recompute`,
    `offload` and `rows_per_tile` are as in `ComputeGraph.plan`: one word, or patterns of names; one word, or several; a
    number."""

    steps: int = Field(default=500, ge=1, le=10**9)
    batch: int = Field(default=8, ge=1, le=1 << 16)
    accumulation: int = Field(default=1, ge=1, le=1 << 16)
    leaves: int = Field(default=8, ge=1, le=1 << 16)
    recompute: str | tuple[str, ...] = "none"
    offload: str | tuple[str, ...] = "none"
    rows_per_tile: int = Field(default=512, ge=1, le=MAX_ROWS_PER_TILE)
    dtype: str = "bf16"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    @field_validator("recompute", mode="before")
    @classmethod
    def _words_or_patterns(cls, given: object) -> object:
        """What a plan takes; whether patterns fit a name, the plan says."""
        try:
            Recomputation.of(given)
        except PlanError as error:
            raise ValueError(str(error).partition("] ")[2]) from None
        return given if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]  # of has seen a sequence

    @field_validator("offload", mode="before")
    @classmethod
    def _known_kinds(cls, given: object) -> object:
        """What a plan takes."""
        try:
            check_offload(given)  # type: ignore[arg-type]
        except PlanError as error:
            raise ValueError(str(error).partition("] ")[2]) from None
        return given if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]  # a collection by now

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, name: str) -> str:
        """One spelling, so that another one is no other run."""
        return _one_spelling(name)


class OptimizerSection(_Section):
    """`[optimizer]`: AdamW, linear warm-up, cosine decay to `min_lr_ratio` of the top rate, clipping."""

    lr: float = Field(default=3e-3, gt=0, le=MAX_F32)
    warmup_steps: int = Field(default=50, ge=0, le=10**9)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


_MESHES: Mapping[str, Sequence[tuple[str, ...]]] = {
    "single": [()],
    "ddp": [("dp",)],
    "fsdp": [("fsdp",), ("dp", "fsdp")],
    "tensor_parallel": [("tp",)],
    "hybrid": [("dp", "tp"), ("fsdp", "tp"), ("dp", "fsdp", "tp")],
}


_ABOUT_SHARDING = ("reshard_after_forward", "prefetch", "reduce", "units", "unit_elements")


class DistributionSection(_Section):
    """`[distribution]`: the strategy, the mesh it spreads over, and how axis `fsdp` cuts state (`StateSharding`)."""

    strategy: Literal["single", "ddp", "fsdp", "tensor_parallel", "hybrid"] = "single"
    mesh: dict[str, int] = Field(default_factory=dict)
    workers_per_device: int | None = Field(default=None, ge=1, le=_MAX_WORKERS)
    reshard_after_forward: bool = True
    prefetch: int = Field(default=1, ge=0, le=64)
    reduce: Literal["microbatch", "step"] = "microbatch"
    units: list[str] = Field(default_factory=list, max_length=1024)
    unit_elements: int = Field(default=0, ge=0, le=MAX_SIZE)

    @model_validator(mode="after")
    def _axes_belong_to_strategy(self) -> DistributionSection:
        wanted = _MESHES[self.strategy]
        if set(self.mesh) not in [set(axes) for axes in wanted]:
            names = " or ".join(", ".join(axes) or "no axis" for axes in wanted)
            raise ValueError(f"the mesh of {self.strategy!r} must name {names}, got {self.mesh}")
        usual = DistributionSection.model_construct()
        given = [name for name in _ABOUT_SHARDING if getattr(self, name) != getattr(usual, name)]
        if given and "fsdp" not in self.mesh:
            raise ValueError(f"{given[0]} is about state cut over the mesh's axis fsdp, got {self.mesh}")
        if not all(1 <= size <= _MAX_AXIS for size in self.mesh.values()):
            raise ValueError(f"every axis of the mesh must lie in 1 to {_MAX_AXIS}, got {self.mesh}")
        return self


class OutputSection(_Section):
    """`[output]`: where checkpoints, metrics, the loss curve and the finished model go, and while it runs what is
    offloaded, unless that has a directory of its own. In a file, a relative directory starts where the file lies.

    `dtype` is the element type of the finished model's weights; None for that of the model that training starts from,
    and for fp32 in a new model."""

    directory: _Path = "runs/train"
    checkpoint_every: int = Field(default=100, ge=1, le=10**9)
    keep_checkpoints: int = Field(default=2, ge=1, le=10**9)
    offload_directory: _Path | None = None
    dtype: str | None = None

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, name: str | None) -> str | None:
        return None if name is None else _one_spelling(name)


class TrainConfig(_Section):
    """A whole configuration file."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    distribution: DistributionSection = DistributionSection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _batch_fits(self) -> TrainConfig:
        batch, leaves, context = self.train.batch, self.train.leaves, self.data.context
        if batch % leaves:
            raise ValueError(f"train.batch must divide by train.leaves, got {batch} over {leaves}")
        if batch * context > _MAX_TOKENS_PER_STEP:
            raise ValueError(
                f"train.batch x data.context must be at most {_MAX_TOKENS_PER_STEP}, got {batch} x {context}"
            )
        return self

    def what_must_match(self) -> dict[str, Any]:
        """Everything that decides the result: all but output, distribution, microbatches, what is recomputed or
        offloaded, and the size of tiles, which change no bit of it, and where the data lies, for what it says is
        compared by content."""
        sections = self.model_dump(
            exclude={
                "model": True,
                "output": True,
                "distribution": True,
                "data": {"path"},
                "train": {"accumulation", "recompute", "offload", "rows_per_tile"},
            }
        )
        return {"model": make_model_config(self).to_dict(), **sections}


def load_config(path: str | Path) -> TrainConfig:
    """Read and check a configuration file; relative paths in it (data, output) start at its own directory.

    Raises:
        ConfigError: no such file, not TOML, or a wrong key or value; names its place.
    """
    path = _border.path("load_config", "a configuration", path)
    try:
        content = _parse_toml(decode_text(read_whole(path, _MAX_FILE_BYTES)))
    except Unreadable as error:
        raise ConfigError(
            f"[train.load_config] the configuration must be a readable TOML file; got {str(path)!r}: {error}; "
            "check the path, or repair it"
        ) from None
    config = _with_paths_from(check_config(content, repr(str(path))), path.parent)
    make_model_config(config)
    return config


def check_config(content: Mapping[str, Any], where: str) -> TrainConfig:
    """The configuration that some sections describe.

    Args:
        where: they stand, for messages.

    Raises:
        ConfigError: a wrong key or value; names its place.
    """
    try:
        return TrainConfig.model_validate(_border.mapping("config", "a configuration", content, "sections"))
    except ValidationError as error:
        raise ConfigError(f"[train.config] {first_problem(error)} in {where}; correct it") from None


# Sizes of a model that the file does not name: of the demo.
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
    """The model; in a new one `<|endoftext|>` has id 0 and both starts and ends a document.

    Raises:
        ConfigError: sizes that do not fit together, an unknown key, or no model at `model.path`.
    """
    _border.instance("config", "a configuration", config, TrainConfig, "pass what load_config returned")
    if config.model.path is not None:
        return models.open(config.model.path, ignore=config.model.ignore_config_fields)
    family = models.FAMILIES.get(config.model.model_type)
    if family is None:
        _border.refuse(
            "config",
            f"model.model_type must be one of {', '.join(models.FAMILIES)}",
            shown(config.model.model_type),
            "choose one",
        )
    known = {field.name for field in fields(family.config)}
    defaults = {
        **_SMALL,
        "max_position_embeddings": config.data.context,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    defaults = {
        family.config.spelled(name): value
        for name, value in defaults.items()
        if name in known or name == "eos_token_id"
    }
    extra = config.model.model_extra or {}
    own = next((key for key in ("bos_token_id", "eos_token_id") if key in extra), None)
    if own is not None:
        _border.refuse(
            "config",
            "a new model's tokenizer begins and ends documents with id 0, so model has no such key",
            f"{own} = {shown(extra[own])}",
            "remove it",
        )
    given = {**defaults, **extra, "model_type": family.name}
    model = models.config_from_dict(given, only_known=True)
    if model.vocab_size < _LEAST_VOCABULARY:
        _border.refuse(
            "config",
            f"model.vocab_size must hold 256 bytes and the special tokens, at least {_LEAST_VOCABULARY}",
            str(model.vocab_size),
            "choose a larger one",
        )
    return model


def make_optimizer(config: TrainConfig) -> AdamW:
    """AdamW as the graph's `optimize` takes it.

    Raises:
        ConfigError: a value is beyond fp32.
    """
    _border.instance("config", "a configuration", config, TrainConfig, "pass what load_config returned")
    names = ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
    return tw.optim.AdamW(**{name: getattr(config.optimizer, name) for name in names})


def make_strategy(config: TrainConfig, mesh: DeviceMesh | None = None) -> DistributionStrategy:
    """The strategy of `[distribution]`, over its mesh or another."""
    own = config.distribution
    sharding = tw.StateSharding(
        ("fsdp",),
        own.reshard_after_forward,
        own.prefetch,
        own.reduce,
        tuple(own.units),
        own.unit_elements,
    )
    return tw.DistributionStrategy.for_mesh(DeviceMesh(own.mesh) if mesh is None else mesh, sharding)


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
    """Relative paths of a file, joined to its directory; an absolute one stays as it is."""
    paths = {"directory": str(directory / config.output.directory)}
    if config.output.offload_directory is not None:
        paths["offload_directory"] = str(directory / config.output.offload_directory)
    output = config.output.model_copy(update=paths)
    config = config.model_copy(update={"output": output})
    if config.model.path is not None:
        model = config.model.model_copy(update={"path": str(directory / config.model.path)})
        config = config.model_copy(update={"model": model})
    if config.data.path == "stdlib":
        return config
    data = config.data.model_copy(update={"path": str(directory / config.data.path)})
    return config.model_copy(update={"data": data})
