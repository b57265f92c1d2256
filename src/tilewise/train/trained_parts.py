"""What a run trains: all parameters, those that `train.freeze` leaves, or the adapters of `[lora]`.

Checkpoints have only what training changes. Frozen weights come from `model.path` again when a run
resumes; a digest of them in every checkpoint shows whether they are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise import models
from tilewise.checkpoint import FinishedModel, StoredWeights, Tensor, formats_of, save_model_directory
from tilewise.checkpoint.adapters import ADAPTER_CONFIG, save_adapter
from tilewise.checkpoint.tensors import read_array
from tilewise.core import ConfigError, model_dtype
from tilewise.train.train_config import TrainConfig, make_model_config

if TYPE_CHECKING:
    from tilewise.graph import Adapter, GraphBuilder
    from tilewise.models import LoraLayout

__all__ = ["TrainedParts", "finished_names", "frozen_digest", "resident_formats", "trained_parts"]


@dataclass(frozen=True)
class TrainedParts:
    """What a run trains.

    Attributes:
        lora: the adapters; None without `[lora]`.
        freeze: patterns of parameters that are frozen.
        adapter_weights: values of an adapter that the run continues with; None for new adapters.
    """

    lora: LoraLayout | None = None
    freeze: tuple[str, ...] = ()
    adapter_weights: Mapping[str, Tensor] | None = None

    @property
    def adapters(self) -> Mapping[str, Adapter] | None:
        """The adapters of a graph, by the names of the weights."""
        return None if self.lora is None else self.lora.adapters

    def apply(self, graph: GraphBuilder) -> None:
        """Freeze what is not trained.

        Raises:
            ConfigError: a pattern of `train.freeze` matches no parameter, or the patterns match all.
        """
        if self.lora is not None:
            self.lora.freeze_base(graph)
        elif self.freeze:
            names = [t.spec.name for t in graph.draft.tensors if t.kind == "parameter"]
            try:
                frozen = graph.freeze_parameters(*self.freeze)
            except ValueError as error:
                got = str(error).partition("; got ")[2].partition(";")[0]
                raise ConfigError(
                    f"[train.plan] train.freeze must have patterns of names of parameters; got {got}; use names like "
                    f"{', '.join(names[:3])} and {names[-1]}"
                ) from None
            if len(frozen) == len(names):
                raise ConfigError(
                    f"[train.plan] train.freeze must leave a parameter that is trained; got {', '.join(self.freeze)}, "
                    "which match all parameters; remove a pattern"
                )

    def weights(self, weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        """The weights of the base, and the adapters' initial values."""
        if self.lora is None:
            return dict(weights)
        return {**weights, **(self.adapter_weights or self.lora.initial(seed))}

    def finished(self, base: str, dtype: str | None) -> FinishedModel:
        """The files of the finished adapter besides its tensors.

        Args:
            base: the model's path.
            dtype: of the finished tensors, as safetensors names it; None for fp32.
        """
        assert self.lora is not None
        names = self.lora.shapes
        return FinishedModel(self.lora.files(base), dict.fromkeys(names, dtype or "F32"))


def trained_parts(config: TrainConfig) -> TrainedParts:
    """What a run trains.

    Raises:
        ConfigError: the adapters do not fit the model.
        CheckpointError: `lora.path` is not an adapter of the model.
    """
    if config.lora is None:
        return TrainedParts(freeze=config.train.freeze)
    model = make_model_config(config)
    layout = models.lora_layout(model, config.lora.lora_config())
    if config.lora.path is None:
        return TrainedParts(layout)
    return TrainedParts(layout, adapter_weights=models.load_adapter(config.lora.path, model).weights)


def resident_formats(config: TrainConfig) -> dict[str, str]:
    """The formats that weights of the base keep in memory, by name. A run without `[lora]`, and one in
    fp32, expands quantised weights.
    """
    if config.lora is None or config.model.path is None or model_dtype(config.train.dtype) != "bf16":
        return {}
    model = make_model_config(config)
    layout = models.lora_layout(model, config.lora.lora_config())
    formats = formats_of(models.open_weights(config.model.path, model))
    return models.formats_in_training(formats, frozenset(layout.saved))


def frozen_digest(weights: Mapping[str, Any], names: list[str]) -> str:
    """SHA-256 of weights as the files have them, by name in order."""
    sha = hashlib.sha256()
    for name in names:
        array = np.ascontiguousarray(read_array(weights[name]))
        sha.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def finished_names(config: TrainConfig) -> tuple[str, str]:
    """The directory of a run's finished weights, and a file that it has."""
    return ("model", "config.json") if config.lora is None else ("adapter", ADAPTER_CONFIG)


def save_finished(
    directory: Path,
    parts: TrainedParts,
    finished: FinishedModel,
    config: TrainConfig,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write the finished model, or the finished adapter.

    Raises:
        ResourceError: it cannot be written.
    """
    if parts.lora is not None:
        save_adapter(directory, finished.files, parts.lora.stored(tensors))
    else:
        stored = models.stored_tensors(make_model_config(config), tensors)
        save_model_directory(directory, finished.files, stored)


def opened_finished(directory: Path, config: TrainConfig) -> StoredWeights | dict[str, Tensor]:
    """The weights of a finished model, or of the base with its finished adapter, for the run's graph.

    Raises:
        CheckpointError: the directory has another model.
    """
    model = make_model_config(config)
    if config.lora is None:
        return models.open_weights(directory, model)
    assert config.model.path is not None
    adapter = models.load_adapter(directory, model)
    return {**models.open_weights(config.model.path, model), **adapter.weights}
