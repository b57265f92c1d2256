"""`tilewise inspect` of a model: shows what its directory contains, what fits in memory, and its
highest possible speed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.checkpoint.gguf.tokenizer import end_tokens
from tilewise.checkpoint.quantised import QuantisedTensor, formats_of
from tilewise.cli.estimate import DeviceProperties
from tilewise.core import CheckpointError
from tilewise.core.limits import available_memory
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import bare, shown

if TYPE_CHECKING:
    from tilewise.checkpoint import GgufModel, StoredWeights
    from tilewise.models import ModelConfig
    from tilewise.models.footprint import Footprint

__all__ = ["describe_model"]

_DTYPES = {"bf16": 2, "f32": 4}
_QUANTISED = "quantised"
_DESCRIBED = ("name", "organization", "quantized_by", "license", "size_label", "file_type")
_MOST_ENDS = 8
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")


def describe_model(source: Path, device: DeviceProperties, ignore: Sequence[str] = ()) -> Iterator[str]:
    """Describe a model, line by line. Only the headers of weights are read, and the head if it must
    be compared with a tied embedding. Without weights, the description comes from config.json.

    Args:
        source: a model's directory, its config.json, or its GGUF file.
        device: memory and peak speeds to use instead of those of this machine.
        ignore: fields of config.json to ignore.

    Raises:
        ConfigError, CheckpointError: the model is not supported. The message names the file and the
            field.
    """
    from tilewise import models
    from tilewise.checkpoint import gguf_model
    from tilewise.models.footprint import footprint

    is_config = source.name == "config.json" and source.is_file()
    directory = source.parent if is_config else source
    config = models.open(directory, ignore=ignore)
    file = gguf_model(directory)
    names = models.config_content(directory).get("architectures")
    kind = f"{names[0]} ({config.model_type})" if names else config.model_type
    stored: StoredWeights | None = None
    has_head = True
    if not is_config and (file is not None or _has_weights(directory)):
        stored, has_head = _open_weights(directory, config)
    yield f"architecture: {kind}" + ("" if has_head else ", without the head")
    yield from _sizes(config)
    shapes = dict(models.parameter_shapes(config))
    if stored is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    count = sum(prod(shape) for shape in shapes.values())
    yield f"parameters: {count:,} ({count / 1e9:.2f} billion)"
    yield _stored_in_words(stored)
    if file is not None:
        yield from _metadata(file)
    sizes = {name: footprint(config, bits=8 * size, shapes=shapes) for name, size in _DTYPES.items()}
    quantised = {} if stored is None else {name: stored[name].nbytes for name in formats_of(stored)}
    if quantised:
        sizes = {_QUANTISED: footprint(config, shapes=shapes, num_bytes=quantised), **sizes}
    in_memory = (f"{name} {format_bytes(size.weights)}" for name, size in sizes.items())
    yield f"weights in memory: {', '.join(in_memory)}"
    if not models.is_encoder(config):
        yield from _cache(config, sizes, device)
    yield from _speed(config, sizes, device)


def _has_weights(directory: Path) -> bool:
    return any(name.endswith(_WEIGHTS) for name in os.listdir(directory))


def _open_weights(model_dir: Path, config: ModelConfig) -> tuple[StoredWeights, bool]:
    """The weights, and whether they include the head, which embeddings do not need."""
    from tilewise import models

    try:
        return models.open_weights(model_dir, config), True
    except CheckpointError:  # other errors are found without the head, too
        return models.open_weights(model_dir, config, with_head=False), False


def _metadata(file: GgufModel) -> Iterator[str]:
    """What a GGUF file says about itself."""
    count = len(file.files.parts)
    size = sum(path.stat().st_size for path, _ in file.files.parts)
    yield f"GGUF: {count} file{'s' if count > 1 else ''}, {format_bytes(size)}, {len(file.files.values)} key-values"
    for key in _DESCRIBED:
        value = file.files.values.get(f"general.{key}")
        if isinstance(value, str | int | float):
            yield f"{key.replace('_', ' ')}: {bare(str(value))}"
    if "tokenizer.json" in file.names:
        values = file.metadata.within("tokenizer.ggml")
        kind, pre = values.text("model"), values.text("pre")
        config = json.loads(file.content("tokenizer_config.json"))
        ends = ", ".join(shown(values.texts("tokens")[i]) for i in end_tokens(file.metadata)[:_MOST_ENDS])
        template = "with" if config.get("chat_template") else "without"
        yield (
            f"tokenizer: {bare(kind)}{f' ({bare(pre)})' if pre else ''}, {len(values.texts('tokens')):,} tokens, "
            f"texts end at {ends or 'no token'}; {template} chat template"
        )


def _stored_in_words(stored: StoredWeights | None) -> str:
    if stored is None:
        return "no weights here; parameters are counted from config.json"
    sizes: Counter[str] = Counter()
    for tensor in stored.values():
        kind = tensor.format.name if isinstance(tensor, QuantisedTensor) else tensor.dtype
        sizes[str(kind)] += tensor.nbytes
    return f"stored as: {', '.join(f'{name} {format_bytes(num)}' for name, num in sorted(sizes.items()))}"


def _sizes(config: ModelConfig) -> Iterator[str]:
    from tilewise import models

    yield (
        f"layers: {config.num_hidden_layers} x {config.hidden_size}, MLP {config.intermediate_size}, "
        f"{config.num_attention_heads} heads; vocabulary {config.vocab_size:,}; context "
        f"{models.max_context(config):,}"
    )


def _cache(config: ModelConfig, sizes: Mapping[str, Footprint], peaks: DeviceProperties) -> Iterator[str]:
    from tilewise import models

    per_token = (f"{name} {format_bytes(size.per_token)}" for name, size in sizes.items())
    yield f"KV cache per token: {', '.join(per_token)}"
    memory = available_memory() if peaks.device_memory is None else peaks.device_memory
    place = "available on this machine" if peaks.device_memory is None else "of the device"
    yield f"memory {place}: {format_bytes(memory)}"
    limit = models.max_context(config)
    for name, size in sizes.items():
        if size.weights >= memory:
            yield f"{name}: does not fit; weights need {format_bytes(size.weights - memory)} more"
        else:
            tokens = size.cached_tokens(memory)
            yield (
                f"{name}: fits, and {tokens:,} tokens of KV cache next to it ({tokens / limit:.1f} times its "
                f"context of {limit:,})"
            )


def _speed(config: ModelConfig, sizes: Mapping[str, Footprint], device: DeviceProperties) -> Iterator[str]:
    """Upper bounds of speed, from measured or given peak speeds of memory and cores."""
    from tilewise import models
    from tilewise.machine import PROBE_BYTES, measure_bandwidth, measure_flops

    try:
        bandwidth = device.bandwidth or measure_bandwidth()
    except MemoryError:
        yield f"speed: not measured, because that needs {format_bytes(PROBE_BYTES)} of memory; give --bandwidth-gbps"
        return
    yield f"{'the device' if device.bandwidth else 'this machine'} reads {bandwidth / 1e9:.1f} GB/s from memory"
    for name, size in sizes.items():
        dtype = "bf16" if name == _QUANTISED else name
        flops = device.flops or measure_flops(dtype)
        rate = f"{flops / (2 * sizes[dtype].read / _DTYPES[dtype]):,.0f} tokens/s"
        line = f"{name}: cores reach {flops / 1e9:.0f} GFLOP/s, so prefill is at most {rate}"
        if not models.is_encoder(config):
            most, each = size.tokens_per_second(bandwidth), format_bytes(size.read)
            line += f"; decoding at most {most:,.1f}, because each token reads {each}"
        yield line
