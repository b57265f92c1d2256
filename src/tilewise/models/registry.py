"""All families, and functions that find the family of a directory's config.json or of a
configuration's class.

Training, generation, encoding and the command line use this module and know no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any

from tilewise.checkpoint import (
    QuantisedTensor,
    StoredWeights,
    Tensor,
    quantise_weights,
    store_parameters,
    without_zero_biases,
)
from tilewise.checkpoint import open_weights as open_files
from tilewise.core.dims import Size
from tilewise.core.errors import CheckpointError, ConfigError
from tilewise.core.validation import Validator, shown
from tilewise.models import (
    bert,
    gemma2,
    gemma3,
    gpt2,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from tilewise.models.decoder.weights import HEAD
from tilewise.models.family import Family
from tilewise.models.layout import FileLayout
from tilewise.models.model_config import ModelConfig, read_config_file
from tilewise.models.parts import ModelParts
from tilewise.nn import GraphBuilder, PreferenceLoss

__all__ = [
    "FAMILIES",
    "PURPOSES",
    "build_decoding_graph",
    "build_encoding_graph",
    "build_training_graph",
    "config_from_dict",
    "default_context",
    "file_layout",
    "is_encoder",
    "kv_bytes_per_token",
    "maker_of",
    "max_context",
    "model_parts",
    "num_parameters",
    "open",
    "open_weights",
    "parameter_shapes",
    "stored_tensors",
    "with_quantization",
]

_validate = Validator("models")
FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, smollm3, olmo2, granite, gpt2, bert)
}
"""Every family by its `model_type`."""
PURPOSES = ("training", "decoding", "encoding")
"""What graphs are made for."""


def open(model_dir: str | Path, *, ignore: Collection[str] = ()) -> ModelConfig:
    """The configuration of a Hugging Face directory, of any family.

    Args:
        model_dir: the directory.
        ignore: fields of config.json to ignore, as in `config_from_dict`.

    Raises:
        ConfigError: there is no config.json, or the model's family or the model is not supported.
    """
    return read_config_file(model_dir, config_from_dict, ignore)


def config_from_dict(
    data: Mapping[str, Any],
    *,
    ignore: Collection[str] = (),
    where: str = "a configuration",
    only_known: bool = False,
) -> ModelConfig:
    """The configuration that a parsed config.json describes.

    Unknown fields that have no effect, by name and value (null, false, a name, a path, a version;
    docs/models.md has the rule), are ignored with one warning for all of them.

    Args:
        data: the parsed file.
        ignore: fields to ignore although the family does not know them, or does not support their
            value. A field in `rope_scaling` is named `rope_scaling.NAME`.
        where: name of the file in the warning.
        only_known: reject every unknown field, for a configuration that is written by hand.

    Raises:
        ConfigError: the model's family or the model is not supported; or `ignore` names a field
            that the computation needs.
    """
    values = _validate.mapping("open", "a configuration", data, "values")
    kind, names = values.get("model_type"), values.get("architectures")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if kind is None and isinstance(names, list) and len(names) == 1:
        classes = (
            (name, one) for one in FAMILIES.values() for name in (one.config.architecture, *one.config.also)
        )
        family = next((one for name, one in classes if name == names[0]), None)
    if family is None:
        family = next((one for one in FAMILIES.values() if one.config.contained_in(values)), None)
    if family is None:
        containers = [kind for one in FAMILIES.values() for kind in one.config.containers]
        raise ConfigError(
            f"[models.open] model_type must be one of {', '.join([*FAMILIES, *containers])}; got {shown(kind)} with "
            f"architectures {shown(names)}; give a model of one of these families"
        )
    return family.config.from_dict(values, ignore=ignore, where=where, only_known=only_known)


def file_layout(config: ModelConfig, *, with_head: bool = True) -> FileLayout:
    """How files store a model's parameters.

    Args:
        config: the model.
        with_head: False omits the head, which embeddings do not need: a decoder's, or the one that an
            encoder is trained with. Files may have it or not.
    """
    return FAMILIES[config.model_type].layout(config, with_head=with_head)


def open_weights(model_dir: str | Path, config: ModelConfig, *, with_head: bool = True) -> StoredWeights:
    """The weights of a Hugging Face directory under the graph's names, for
    `GraphInstance.load_parameters`.

    Args:
        model_dir: with safetensors files.
        config: of the directory, from `open`.
        with_head: see `file_layout`.

    Raises:
        CheckpointError: there are no weights, or they differ from the configuration; names the
            tensor.
        ConfigError: they are quantised, and those of this family cannot be.
    """
    files, layout = open_files(model_dir), file_layout(config, with_head=with_head)
    if any(isinstance(tensor, QuantisedTensor) for tensor in files.values()):
        if any(tensor.is_transposed for tensor in layout.table):
            rule = (
                "quantised weights must be matrices [outputs, inputs], which files of this family do not have"
            )
            _validate.invalid("open_weights", rule, config.model_type, "give the unquantised weights")
        files = without_zero_biases(files, {*layout.names, *layout.names_without_prefix})
    if HEAD in layout.names and HEAD not in layout.unwrapped(files):
        file_layout(config, with_head=False).weights(files)  # reports other missing tensors first
        raise CheckpointError(
            f"[models.open_weights] a model that generates must have a head; got no {HEAD!r} in {str(model_dir)!r}; "
            "compute embeddings (--runner pooling, runner='pooling'), or set tie_word_embeddings in config.json if "
            "the embedding is its head"
        )
    weights = layout.weights(files)
    weights.require_shapes(dict(parameter_shapes(config)))
    return weights


def with_quantization(
    weights: StoredWeights, config: ModelConfig, quantization: str | None
) -> Mapping[str, Tensor]:
    """Weights with those of products quantised while they are read; norms, biases and embeddings stay.

    Args:
        weights: from `open_weights`.
        config: of the model.
        quantization: `int8`, `int4`, `int8:128` or `int4:128` (`EngineSettings.quantization`); None for the
            weights as they are.

    Raises:
        ConfigError: the files are quantised.
    """
    if quantization is None:
        return weights
    names = [
        name
        for name, shape in parameter_shapes(config)
        if name in weights and len(shape) == 2 and not name.startswith("embed_")
    ]
    return quantise_weights(weights, names, quantization)


def stored_tensors(
    config: ModelConfig, parameters: Mapping[str, Tensor], *, with_head: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """A graph's parameters under the names of the family's files, for `save_pretrained`; each is
    fetched when it is written.

    Args:
        config: of the model.
        parameters: by name in the graph.
        with_head: see `file_layout`.
    """
    return store_parameters(file_layout(config, with_head=with_head).table, parameters)


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter's name in the training graph and its shape, in the order of the forward pass;
    a tied head has no entry of its own.
    """
    return FAMILIES[config.model_type].shapes(config)


def num_parameters(config: ModelConfig) -> int:
    """The number of elements of all parameters; a tied head counts once."""
    return sum(prod(shape) for _, shape in parameter_shapes(config))


def max_context(config: ModelConfig) -> int:
    """The longest sequence that a model supports."""
    return FAMILIES[config.model_type].max_context(config)


def default_context(config: ModelConfig) -> int:
    """The default context limit of a model: its `max_position_embeddings`, extended if its RoPE
    scaling applies to texts of every length. Only models with `dynamic` scaling support more, up to
    `max_context`.
    """
    return FAMILIES[config.model_type].default_context(config)


def kv_bytes_per_token(config: ModelConfig, itemsize: float, kv_cache_dtype: str = "auto") -> float:
    """Bytes of the KV cache for one token; 0 for encoders.

    Args:
        config: the model.
        itemsize: bytes of an element in the model's dtype.
        kv_cache_dtype: as in `build_decoding_graph`.
    """
    return FAMILIES[config.model_type].kv_bytes(config, itemsize, kv_cache_dtype)


def is_encoder(config: ModelConfig) -> bool:
    """Whether a model encodes texts as vectors and does not generate."""
    return FAMILIES[config.model_type].encoding is not None


def maker_of(config: ModelConfig, purpose: str) -> Callable[..., ModelParts]:
    """The function that makes a model's parts for a purpose.

    Raises:
        ConfigError: the model does not support this purpose.
    """
    _validate.choice("model_parts", "a purpose", purpose, PURPOSES)
    family = FAMILIES[config.model_type]
    make: Callable[..., ModelParts] | None = getattr(family, purpose)
    if make is None:
        wrong = {
            "decoding": "this needs a model that generates text; got a {}, which only encodes; use tilewise encode",
            "encoding": "encoding needs an encoder; got a {}, which generates text; use tilewise generate",
        }
        raise ConfigError(f"[models.{family.name}] {wrong[purpose].format(config.architecture)}")
    return make


def model_parts(config: ModelConfig, purpose: str, *sizes: Any, **named: Any) -> ModelParts:
    """A model divided at its layers, for `training`, `decoding` or `encoding`.

    Args:
        config: the model.
        purpose: one of `PURPOSES`.
        sizes: the arguments of `build_training_graph`, `build_decoding_graph` or
            `build_encoding_graph` after the configuration.
        named: the same, by name.

    Raises:
        ConfigError: the model does not support this purpose, or the sizes are not its arguments.
        ShapeError: a size is invalid.
    """
    make = maker_of(config, purpose)
    try:
        signature(make).bind(config, *sizes, **named)
    except TypeError as error:
        raise ConfigError(
            f"[models.model_parts] sizes must be those of build_{purpose}_graph; got {shown(sizes)} and "
            f"{shown(named)}: {error}; pass its arguments after the configuration"
        ) from None
    return make(config, *sizes, **named)


def build_training_graph(
    graph: GraphBuilder,
    config: ModelConfig,
    batch: int,
    seq: Size,
    dtype: str = "bf16",
    *,
    preference: PreferenceLoss | None = None,
    has_documents: bool = False,
) -> None:
    """Define one training step in an empty graph: prediction of the next token, or of masked ones
    for encoders.

    Args:
        graph: to define it in.
        config: the model.
        batch: sequences per step, over all devices and microbatches.
        seq: tokens per sequence; a `Dim("seq", 1, 512)` for batches of any length up to its bound.
            Shorter sequences are padded at the end with any token, whose label is not counted. The
            bound is the context limit that determines RoPE's frequencies.
        dtype: of weights and activations, `bf16` or `f32`; sums, gradients and optimizer states are
            fp32.
        preference: a loss on pairs (`nn.preference_loss`) instead of the mean cross-entropy, for
            decoders. Sequences 2i and 2i + 1 are the chosen and the rejected one of a pair.
        has_documents: a sequence has several documents that do not see each other, for decoders.
            Then there are the inputs positions and first `[B, S]` i32: the position of a token in
            its document, and that of the document's first token in the sequence.

    Inputs: tokens and labels `[B, S]` i32 (-100 is not counted); for encoders also token_types `[B,
    S]` and lengths `[B]`. Outputs: loss `[1]`, loss_rows `[B, S]`. With `preference`, there are the
    inputs of `nn.preference_loss`, and the output log_probs `[B]` instead of loss_rows.

    Raises:
        ConfigError: `preference` or `has_documents` for an encoder.
        ShapeError: a size is invalid, or `seq` exceeds the model's positions.
    """
    more: dict[str, object] = {} if preference is None else {"preference": preference}
    more |= {"has_documents": True} if has_documents else {}
    model_parts(config, "training", batch, seq, dtype, **more).build(graph)


def build_decoding_graph(
    graph: GraphBuilder,
    config: ModelConfig,
    max_tokens: int,
    max_sequences: int,
    num_blocks: int,
    dtype: str = "bf16",
    *,
    context: int | None = None,
    num_positions: int | None = None,
    max_rows: int | None = None,
    with_head: bool = True,
    kv_cache_dtype: str = "auto",
    gates: tuple[int, int] | None = None,
) -> None:
    """Define prefill and decoding over flattened tokens in an empty graph.

    Args:
        graph: to define it in.
        config: the model.
        max_tokens: largest number of tokens in one call.
        max_sequences: largest number of rows of the block table.
        num_blocks: KV blocks of 64 positions.
        dtype: of weights, activations and cache.
        context: the limit of positions per sequence, which determines RoPE's frequencies; by
            default `default_context`.
        num_positions: maximum number of positions that one sequence uses; by default all.
        max_rows: largest number of tokens with logits; by default `max_sequences`.
        with_head: False: the graph ends before the head.
        kv_cache_dtype: `auto`: the cache has the dtype; `int8`: a cached number is code * scale,
            rounded to the dtype, with one scale for every position and head.
        gates: the shape of the gates of adapters (`models.stack_adapters`); None without adapters.

    Inputs, all i32: tokens, positions, slots, sequence `[T]`; block_table `[S, blocks]`; rows
    `[R]`; with gates also adapter `[T]`, 0 for none. Output: logits `[R, V]`; without a head, hidden `[R, D]`.

    Raises:
        ConfigError: the model does not generate.
        ShapeError: a size is invalid, the context exceeds the model's, or the head size is not a
            multiple of 4 and the cache is to be int8.
    """
    sizes = (max_tokens, max_sequences, num_blocks, dtype)
    bounds = {"context": context, "num_positions": num_positions, "max_rows": max_rows}
    more = {"with_head": with_head, "kv_cache_dtype": kv_cache_dtype}
    more |= {} if gates is None else {"gates": gates}
    model_parts(config, "decoding", *sizes, **bounds, **more).build(graph)


def build_encoding_graph(
    graph: GraphBuilder, config: ModelConfig, batch: int, seq: Size, dtype: str = "bf16"
) -> None:
    """Define the encoding of texts in an empty graph.

    Args:
        graph: to define it in.
        config: the model.
        batch: texts of one call.
        seq: tokens of each, or a `Dim` with a bound; shorter texts are padded at the end.
        dtype: of weights and activations.

    Inputs, i32: tokens and token_types `[B, S]`, lengths `[B]`. Output: hidden `[B, S, D]`.

    Raises:
        ConfigError: the model generates and does not encode.
        ShapeError: a size is invalid, or `seq` exceeds the model's positions.
    """
    model_parts(config, "encoding", batch, seq, dtype).build(graph)
