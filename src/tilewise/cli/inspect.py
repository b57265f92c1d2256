"""`tilewise inspect`: what a model directory holds, what fits on this machine, and how fast it can be at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.checkpoint import StoredWeights
    from tilewise.models import ModelConfig

__all__ = ["describe_model"]

_DTYPES = {"bf16": 2, "f32": 4}


def describe_model(model_dir: Path, ignore: Sequence[str] = ()) -> Iterator[str]:
    """Lines about a model directory; of weights the headers are read, and a copied tied head.

    Args:
        model_dir: the directory.
        ignore: fields of config.json that are left aside.

    Raises:
        ConfigError, CheckpointError: it is no model we can run; names file and field.
    """
    from tilewise import models
    from tilewise.core.limits import memory_of_machine

    config = models.open(model_dir, ignore=ignore)
    files, has_head = _open_weights(model_dir, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in files.items()}
    names = models.config_content(model_dir).get("architectures")
    kind = f"{names[0]} ({config.model_type})" if names else config.model_type
    yield f"architecture: {kind}" + ("" if has_head else ", without the head")
    yield from _sizes(config)
    count = sum(prod(shape) for shape in shapes.values())
    yield f"parameters: {count:,} ({count / 1e9:.2f} billion)"
    stored: Counter[str] = Counter()
    for tensor in files.values():
        stored[str(tensor.dtype)] += tensor.nbytes
    yield f"stored as: {', '.join(f'{name} {_size(num)}' for name, num in sorted(stored.items()))}"
    weights = {name: count * size for name, size in _DTYPES.items()}
    yield f"weights in memory: {', '.join(f'{name} {_size(num)}' for name, num in weights.items())}"
    memory = memory_of_machine()
    if not models.is_encoder(config):
        yield from _cache(config, weights, memory)
    yield from _speed(config, shapes)


def _open_weights(model_dir: Path, config: ModelConfig) -> tuple[StoredWeights, bool]:
    """The weights, and whether the head is among them: models that only make vectors do without."""
    from tilewise import models
    from tilewise.core import CheckpointError

    try:
        return models.open_weights(model_dir, config), True
    except CheckpointError:  # anything else that is wrong is found without the head, too
        return models.open_weights(model_dir, config, with_head=False), False


def _sizes(config: ModelConfig) -> Iterator[str]:
    from tilewise import models

    yield (
        f"layers: {config.num_hidden_layers} x {config.hidden_size}, MLP {config.intermediate_size}, "
        f"{config.num_attention_heads} heads; vocabulary {config.vocab_size:,}; context "
        f"{models.max_context(config):,}"
    )


def _cache(config: ModelConfig, weights: Mapping[str, int], memory: int) -> Iterator[str]:
    from tilewise import models

    per_token = models.kv_elements_per_token(config)
    yield f"KV cache per token: {', '.join(f'{n} {_size(per_token * s)}' for n, s in _DTYPES.items())}"
    yield f"memory of this machine: {_size(memory)}"
    limit = models.max_context(config)
    for name, size in _DTYPES.items():
        free = memory - weights[name]
        tokens = max(0, free // (per_token * size))
        if free <= 0:
            yield f"{name}: does not fit; weights need {_size(-free)} more"
        else:
            yield (
                f"{name}: fits, and {tokens:,} tokens of KV cache beside it ({tokens / limit:.1f} times its context of "
                f"{limit:,})"
            )


def _speed(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Bounds from what this machine's memory and cores really reach, measured now."""
    from tilewise import models
    from tilewise.machine import PROBE_BYTES, measure_bandwidth, measure_flops

    tied = "lm_head.weight" not in shapes and not models.is_encoder(config)
    table = prod(shapes["embed_tokens.weight"])
    read = sum(prod(s) for s in shapes.values())
    if not tied:
        read -= table  # of an embedding one row is read per token
    try:
        bandwidth = measure_bandwidth()
    except MemoryError:
        yield f"speed: not measured, since that takes {_size(PROBE_BYTES)} of memory"
        return
    yield f"this machine reads {bandwidth / 1e9:.1f} GB/s from memory"
    for name, size in _DTYPES.items():
        flops = measure_flops(name)
        line = f"{name}: cores reach {flops / 1e9:.0f} GFLOP/s, so it reads at most {flops / (2 * read):,.0f} tokens/s"
        if not models.is_encoder(config):
            line += f"; it writes at most {bandwidth / (read * size):,.1f}, since each token reads {_size(read * size)}"
        yield line


def _size(num_bytes: float) -> str:
    """A size as people read it."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{int(num_bytes)} bytes"
