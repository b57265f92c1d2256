"""`Family`: the interface of a family of models for code outside of `models`: configuration, names in files,
graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from tilewise.checkpoint import StoredTensor
from tilewise.models.decoder import model
from tilewise.models.decoder.architecture import Decoder
from tilewise.models.decoder.weights import HEAD, parameter_shapes, stored_by_name
from tilewise.models.layout import FileLayout
from tilewise.models.model_config import ModelConfig
from tilewise.models.parts import ModelParts

__all__ = ["Family", "decoder_family"]


@dataclass(frozen=True)
class Family:
    """The functions of a family's folder. Each takes a configuration of the family.

    Attributes:
        config: its configurations.
        layout: how files hold a model's parameters; `with_head` says whether a head is needed: a decoder's, or the one
            that encoders are trained by.
        shapes: every parameter's name in the training graph and its shape, in the order of the forward pass.
        max_context: the longest sequence that a model supports.
        default_context: the default context limit.
        training: (config, batch, seq, dtype) describes one training step.
        kv_bytes: (config, itemsize, kv_cache_dtype) returns the bytes of the KV cache per token; 0 for models that do
            not write.
        decoding: (config, max_tokens, max_sequences, num_blocks, dtype, context, num_positions, max_rows,
            with_head, kv_cache_dtype) describes prefill and decoding; None for models that do not write.
        encoding: (config, batch, seq, dtype) describes the vectors of all tokens of texts; None for models that
            do not encode.
    """

    config: type[ModelConfig]
    layout: Callable[..., FileLayout]
    shapes: Callable[[Any], Iterator[tuple[str, tuple[int, ...]]]]
    max_context: Callable[[Any], int]
    default_context: Callable[[Any], int]
    kv_bytes: Callable[[Any, float, str], float]
    training: Callable[..., ModelParts]
    decoding: Callable[..., ModelParts] | None = None
    encoding: Callable[..., ModelParts] | None = None

    @property
    def name(self) -> str:
        """The `model_type` in config.json."""
        return self.config.model_type


def decoder_family(
    config: type[ModelConfig],
    stored: Callable[[Decoder], Iterable[StoredTensor]] = stored_by_name,
    *,
    prefix: str = "model.",
    derived: str | None = None,
    inside: Mapping[str, str] | None = None,
    others: str | None = None,
    embedding: str = "model.embed_tokens.weight",
) -> Family:
    """A family of decoders (`models/decoder/`).

    Args:
        config: class of its configurations, which have a `decoder`.
        stored: returns the table of tensors in files, if they are not one per parameter under the
            graph's names.
        prefix: of names in files.
        derived: see `FileLayout`; by default RoPE buffers of older files.
        inside: see `FileLayout`.
        others: see `FileLayout`.
        embedding: name in files, of which a tied head may be a copy.
    """

    def layout(configuration: Any, *, with_head: bool) -> FileLayout:
        table, copies = (
            tuple(stored(configuration.decoder)),
            {HEAD: embedding} if configuration.decoder.tied_head else {},
        )
        file_layout = FileLayout(table, prefix, copies=copies, inside=inside or {}, others=others)
        file_layout = file_layout if derived is None else replace(file_layout, derived=derived)
        if with_head:
            return file_layout
        table = tuple(tensor for tensor in table if tensor.name != HEAD)
        return replace(
            file_layout, table=table, copies={}, derived=f"{file_layout.derived}|{re.escape(HEAD)}"
        )

    @wraps(model.training_parts)
    def training(configuration: Any, *sizes: Any, **named: Any) -> ModelParts:
        return model.training_parts(configuration.decoder, *sizes, **named)

    @wraps(model.decoding_parts)
    def decoding(configuration: Any, *sizes: Any, **named: Any) -> ModelParts:
        return model.decoding_parts(configuration.decoder, *sizes, **named)

    def shapes(configuration: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        return parameter_shapes(configuration.decoder)

    def kv_bytes(configuration: Any, itemsize: float, kv_cache_dtype: str) -> float:
        decoder = configuration.decoder
        columns, is_int8 = model.cache_columns(decoder, kv_cache_dtype)
        return 2 * len(decoder.layers) * columns * (4 if is_int8 else itemsize)

    def max_context(configuration: Any) -> int:
        return int(configuration.decoder.max_positions)

    def default_context(configuration: Any) -> int:
        return int(configuration.decoder.default_context)

    return Family(config, layout, shapes, max_context, default_context, kv_bytes, training, decoding)
