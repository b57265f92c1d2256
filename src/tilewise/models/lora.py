"""Low-rank adapters of a model: which of its weights have one, the names of their parameters in graphs and in
PEFT's files, initial values, and weights with an adapter merged into them.

Modules are those of Hugging Face files. If a file's module is several weights of the graph (queries, keys and
values of GPT-2), these share its a, and its b is theirs one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import LazyTensor, StoredTensor, StoredWeights, Tensor, store_parameters
from tilewise.checkpoint.adapters import PREFIX, LoraConfig, OpenAdapter, adapter_files, open_adapter
from tilewise.checkpoint.tensors import read_array
from tilewise.core.errors import CheckpointError, ConfigError
from tilewise.core.log import warn_once
from tilewise.core.validation import Validator, shown
from tilewise.graph import Adapter
from tilewise.graph.adapters import LORA_A, LORA_B
from tilewise.ir.graph import PANEL_ROWS
from tilewise.models.decoder.model import GATES
from tilewise.models.decoder.weights import HEAD
from tilewise.models.model_config import ModelConfig
from tilewise.models.registry import file_layout, is_encoder, parameter_shapes
from tilewise.nn import GraphBuilder

__all__ = [
    "LoadedAdapter",
    "LoraLayout",
    "StackedAdapters",
    "load_adapter",
    "lora_layout",
    "merged_weights",
    "stack_adapters",
]

_validate = Validator("lora")
_EMBEDDINGS = "embed_"  # begins the names of tables, which are no products
_BY_DEFAULT = ("q_proj", "v_proj")


@dataclass(frozen=True)
class LoraLayout:
    """The adapters of a model.

    Attributes:
        config: their settings.
        adapters: by the names of the weights in the graph, for `ComputeGraph(adapters=...)`.
        modules: the modules that have adapters: the last parts of their names in files if these select
            the same modules, otherwise their names, in order.
        base: the names of all parameters of the model itself.
        saved: those of them that are trained, and saved with the adapters.
        table: the tensors of a PEFT file, and the parameters in them.
        shapes: the shapes of the adapters' parameters and of `saved`.
        is_transposed: whether files store the adapted weights as `[in, out]`.
        task: PEFT's name of the task.
    """

    config: LoraConfig
    adapters: Mapping[str, Adapter]
    modules: tuple[str, ...]
    base: tuple[str, ...]
    saved: tuple[str, ...]
    table: tuple[StoredTensor, ...]
    shapes: Mapping[str, tuple[int, ...]]
    is_transposed: bool
    task: str

    def freeze_base(self, graph: GraphBuilder) -> None:
        """Freeze every parameter of a graph that belongs to the model and is not in `saved`."""
        trained = {*self.saved}
        for name in self.base:
            if graph.has(name) and name not in trained:
                graph.draft.freeze_parameter(graph.find(name).id)

    def initial(self, seed: int) -> dict[str, LazyTensor]:
        """Initial values of the adapters' parameters, fp32. They depend only on seed and name."""
        return {
            name: LazyTensor(
                shape, np.dtype(np.float32), partial(_initial, name, shape, self.config.init, seed)
            )
            for name, shape in self.shapes.items()
            if name.endswith((LORA_A, LORA_B))
        }

    def weights(self, tensors: Mapping[str, Any]) -> StoredWeights:
        """The tensors of a PEFT file under the graph's names.

        Raises:
            CheckpointError: tensors are missing, unknown, or of another shape.
        """
        weights = StoredWeights(tensors, self.table)
        weights.require_shapes(dict(self.shapes))
        return weights

    def stored(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The graph's parameters under the names of PEFT's files, each fetched when it is written."""
        return store_parameters(self.table, parameters)

    def files(self, base: str | None) -> dict[str, bytes]:
        """The content of an adapter's files besides its tensors; `base` is the model's path or name."""
        return adapter_files(
            self.config, self.modules, base=base, is_transposed=self.is_transposed, task=self.task
        )


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter from a directory, and how it fits a model.

    Attributes:
        layout: the adapters of the model.
        weights: their parameters, by name in the graph; read on use.
    """

    layout: LoraLayout
    weights: StoredWeights


def lora_layout(config: ModelConfig, lora: LoraConfig) -> LoraLayout:
    """The adapters that settings describe for a model.

    Raises:
        ConfigError: no module of the model is a target; a target is an embedding or a tied head; or
            `modules_to_save` names no module, or one that is tied to another.
    """
    stored, shapes = file_layout(config).table, dict(parameter_shapes(config))
    linears = {module: tensor for tensor in stored if (module := _linear_of(tensor, shapes)) is not None}
    defaults = [
        m
        for m, t in linears.items()
        if any(f".{n}." in name for n in _BY_DEFAULT for name, _ in t.parameters)
    ]
    targets = {
        module: tensor
        for module, tensor in linears.items()
        if lora.is_target(module, defaults)
        and not (lora.target_modules == "all-linear" and tensor.name == HEAD)
    }
    is_tied = not is_encoder(config) and not any(tensor.name == HEAD for tensor in stored)
    _check_targets(lora, stored, linears, targets, is_tied=is_tied)
    saved = [tensor for tensor in stored if lora.modules_to_save and lora.is_saved(_module_of(tensor))]
    _check_saved(config, lora, stored, saved)
    adapters, table, own_shapes = dict[str, Adapter](), list[StoredTensor](), dict[str, tuple[int, ...]]()
    for module, tensor in targets.items():
        rank = lora.rank_of(module)
        names = [name for name, _ in tensor.parameters]
        shared = f"{names[0].removesuffix('.weight')}.{LORA_A}" if len(names) > 1 else ""
        adapter = Adapter(rank, lora.scale_of(module, rank), lora.dropout, shared)
        adapters |= dict.fromkeys(names, adapter)
        (a, _), columns = adapter.names(names[0]), shapes[names[0]][1]
        bs = tuple((adapter.names(name)[1], shapes[name][0]) for name in names)
        table.append(StoredTensor(f"{PREFIX}{module}.{LORA_A}", ((a, rank),)))
        table.append(StoredTensor(f"{PREFIX}{module}.{LORA_B}", bs))
        own_shapes |= {a: (rank, columns), **{name: (rows, rank) for name, rows in bs}}
    for tensor in saved:
        table.append(StoredTensor(PREFIX + tensor.name, tensor.parameters, tensor.is_transposed))
        own_shapes |= {name: shapes[name] for name, _ in tensor.parameters}
    return LoraLayout(
        lora,
        adapters,
        _shortest(lora, linears, defaults, targets),
        tuple(shapes),
        tuple(name for tensor in saved for name, _ in tensor.parameters),
        tuple(table),
        own_shapes,
        any(tensor.is_transposed for tensor in targets.values()),
        "FEATURE_EXTRACTION" if is_encoder(config) else "CAUSAL_LM",
    )


def _shortest(
    lora: LoraConfig, linears: Iterable[str], defaults: Sequence[str], targets: Iterable[str]
) -> tuple[str, ...]:
    """The last parts of the targets' names, as people write them, if they select the same modules."""
    names = [*targets]
    ends = tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))
    short = replace(lora, target_modules=ends)
    return ends if [m for m in linears if short.is_target(m, defaults)] == names else tuple(names)


def _module_of(tensor: StoredTensor) -> str:
    return tensor.name.rpartition(".")[0]


def _linear_of(tensor: StoredTensor, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The module of a tensor that is the weight of a product; None for others."""
    name, _ = tensor.parameters[0]
    is_linear = name.endswith(".weight") and len(shapes[name]) == 2 and not name.startswith(_EMBEDDINGS)
    return _module_of(tensor) if is_linear else None


def _check_targets(
    lora: LoraConfig,
    stored: Sequence[StoredTensor],
    linears: Mapping[str, StoredTensor],
    targets: Mapping[str, StoredTensor],
    *,
    is_tied: bool,
) -> None:
    """`is_tied`: the model has a head whose weight is the embedding."""
    modules = dict.fromkeys(map(_module_of, stored))
    listed = lora.target_modules if isinstance(lora.target_modules, tuple) else ()
    missing = [name for name in listed if not any(f".{m}".endswith(f".{name}") for m in linears)]
    others = [m for name in missing for m in modules if f".{m}".endswith(f".{name}")]
    examples = ", ".join(sorted({m.rpartition(".")[2] for m in linears}))
    rule, advice = "target_modules must be linear modules of the model", f"choose among {examples}"
    head = HEAD.rpartition(".")[0]
    if head in missing and is_tied:
        _validate.invalid("layout", rule, f"{head!r}, which is tied to the embedding", "remove it")
    if others:
        _validate.invalid("layout", rule, f"{others[0]!r}, which is not linear", advice)
    if not targets:
        _validate.invalid("layout", rule, f"{shown(lora.target_modules)}, which matches none", advice)
    if missing:
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        warn_once("lora", f"target_modules has {', '.join(missing[:3])}{rest}, which the model does not have")


def _check_saved(
    config: ModelConfig, lora: LoraConfig, stored: Sequence[StoredTensor], saved: Sequence[StoredTensor]
) -> None:
    rule = "modules_to_save must be modules of the model"
    modules = dict.fromkeys(map(_module_of, stored))
    for name in lora.modules_to_save:
        if not any(LoraConfig(modules_to_save=(name,)).is_saved(module) for module in modules):
            advice = "remove it, or correct its name"
            _validate.invalid("layout", rule, f"{name!r}, which the model does not have", advice)
    is_tied = not any(tensor.name == HEAD for tensor in stored)
    table = next((n for t in saved for n, _ in t.parameters if n == "embed_tokens.weight"), None)
    if is_tied and table is not None:
        rule = "modules_to_save must not be tied to another module, because PEFT would train a copy"
        _validate.invalid("layout", rule, "the embedding, which is also the head", "remove it")


def _initial(name: str, shape: tuple[int, ...], init: bool | str, seed: int) -> NDArray[np.float32]:
    """Initial values as in PEFT: `LoraConfig.init`."""
    generator = np.random.Generator(np.random.Philox(key=[seed, crc32(name.encode())]))
    if name.endswith(LORA_B) and init is not False:
        return np.zeros(shape, np.float32)
    if init == "gaussian":
        return generator.standard_normal(shape, np.float32) * np.float32(1 / shape[0])
    bound = np.float32(1 / sqrt(shape[1]))
    return (generator.random(shape, np.float32) * 2 - 1) * bound


def load_adapter(directory: str | Path | OpenAdapter, config: ModelConfig) -> LoadedAdapter:
    """Open an adapter in a PEFT directory for a model.

    Raises:
        CheckpointError: it is no such directory, or it does not fit the model.
        ConfigError: a setting is not supported.
    """
    adapter = directory if isinstance(directory, OpenAdapter) else open_adapter(directory)
    try:
        layout = lora_layout(config, adapter.config)
        weights = layout.weights(adapter.tensors)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(
            f"[models.load_adapter] an adapter must belong to the model; got {str(adapter.path)!r}, of "
            f"{adapter.base or 'another'}: {str(error).partition('] ')[2]}; give the model that it was trained on"
        ) from None
    _warn_of_missing_modules(adapter, config)
    return LoadedAdapter(layout, weights)


def _warn_of_missing_modules(adapter: OpenAdapter, config: ModelConfig) -> None:
    """One warning if an adapter has no tensors for modules that its configuration names."""
    shapes, present = dict(parameter_shapes(config)), frozenset(adapter.config.target_modules or ())
    modules = [m for t in file_layout(config).table if (m := _linear_of(t, shapes)) is not None]
    named = [m for m in modules if any(f".{m}".endswith(f".{target}") for target in adapter.targets)]
    missing = [m for m in named if m not in present]
    if missing:
        warn_once(
            "models",
            f"the adapter {str(adapter.path)!r} has no tensors for {len(missing)} of the {len(named)} modules that its "
            f"configuration names, such as {missing[0]}; they stay as in the model",
        )


def merged_weights(weights: Mapping[str, Tensor], adapter: LoadedAdapter) -> dict[str, Tensor]:
    """A model's weights with an adapter added: `w + scale * b a`, computed in fp32, in the weights' dtypes.
    Each is computed when it is read.

    Args:
        weights: of the model, by name in the graph.
        adapter: of the same model.
    """
    merged = dict(weights)
    for name, own in adapter.layout.adapters.items():
        w = weights[name]
        merged[name] = LazyTensor(tuple(w.shape), w.dtype, partial(_merged, name, w, own, adapter.weights))
    return merged | {name: adapter.weights[name] for name in adapter.layout.saved}


@dataclass(frozen=True)
class StackedAdapters:
    """Several adapters of a model as one, whose gates select a part of it for each row.

    A row's result does not depend on other adapters: their parts are multiplied by zero, and begin at
    multiples of 32, so that sums have the same order.

    Attributes:
        adapters: by the names of the weights in the graph, for `ComputeGraph(adapters=...)`.
        weights: their parameters and the gates, by name in the graph; computed when they are read.
        gates: the shape of the gates.
    """

    adapters: Mapping[str, Adapter]
    weights: Mapping[str, LazyTensor]
    gates: tuple[int, int]


def stack_adapters(adapters: Mapping[str, LoadedAdapter]) -> StackedAdapters:
    """Several adapters as one. Adapter i of the mapping, from 1 on, has the gates of row i.

    Args:
        adapters: of one model, by name; at least one.

    Raises:
        ConfigError: an adapter has modules that are trained as a whole.
    """
    for name, adapter in adapters.items():
        if adapter.layout.saved:
            rule, advice = (
                "an adapter that is served must have low-rank adapters alone",
                "merge it into the model",
            )
            _validate.invalid("stack", rule, f"{name!r} with {adapter.layout.saved[0]!r}", advice)
    loaded = [*adapters.values()]
    ranks = [own.rank for adapter in loaded for own in adapter.layout.adapters.values()]
    width = -(-max(ranks) // PANEL_ROWS) * PANEL_ROWS
    whole = Adapter(width * len(loaded), is_gated=True)
    shapes: dict[str, tuple[int, int]] = {}  # of weights: rows and columns
    for adapter in loaded:
        for name, own in adapter.layout.adapters.items():
            a, b = own.names(name)
            shapes[name] = adapter.layout.shapes[b][0], adapter.layout.shapes[a][1]
    weights = {}
    for name, (rows, columns) in shapes.items():
        a, b = whole.names(name)
        for is_b, own_name, shape in ((False, a, (whole.rank, columns)), (True, b, (rows, whole.rank))):
            fetch = partial(_stacked, loaded, name, width, shape, is_b)
            weights[own_name] = LazyTensor(shape, np.dtype(np.float32), fetch)
    gates = np.zeros((len(loaded) + 1, whole.rank), np.float32)
    for number in range(len(loaded)):
        gates[number + 1, number * width : (number + 1) * width] = 1.0
    weights[GATES] = LazyTensor(gates.shape, gates.dtype, lambda: gates)
    return StackedAdapters(dict.fromkeys(shapes, whole), weights, gates.shape)


def _stacked(
    adapters: Sequence[LoadedAdapter], name: str, width: int, shape: tuple[int, int], is_b: bool
) -> NDArray[np.float32]:
    """The a of several adapters as rows, or their b with its scale as columns."""
    whole = np.zeros(shape, np.float32)
    for number, adapter in enumerate(adapters):
        own = adapter.layout.adapters.get(name)
        if own is None:
            continue
        first, (a, b) = number * width, own.names(name)
        part = slice(first, first + own.rank)
        if is_b:
            whole[:, part] = read_array(adapter.weights[b]).astype(np.float32) * np.float32(own.scale)
        else:
            whole[part] = read_array(adapter.weights[a])
    return whole


def _merged(name: str, w: Tensor, adapter: Adapter, weights: Mapping[str, Tensor]) -> NDArray[Any]:
    a, b = (read_array(weights[n]).astype(np.float32) for n in adapter.names(name))
    whole: NDArray[Any] = read_array(w).astype(np.float32) + np.float32(adapter.scale) * (b @ a)
    return whole.astype(w.dtype)
