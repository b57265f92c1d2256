"""`Family`: a family of models as code outside of `models` sees it: configuration, names in files,
graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
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
    """What a family's folder offers. Each function takes a configuration of the family.

    Attributes:
        config: its configurations.
        layout: how files hold a model's parameters; `with_head` says whether a head is needed: a decoder's, or the one
            that encoders are trained by.
        shapes: every parameter's name in the training graph and its shape, in the order of the forward pass.
        max_context: the longest sequence that a model is meant for.
        default_context: the context limit where none is asked for.
        training: (config, batch, seq, dtype) describes one training step.
        kv_elements: of the KV cache, per token; 0 for models that do not write.
        decoding: (config, max_tokens, max_sequences, num_blocks, dtype, context, num_positions, max_rows,
            with_head) describes prefill and decoding; None for models that do not write.
        encoding: (config, batch, seq, dtype) describes the vectors of all tokens of texts; None for models that
            do not encode.
    """

    config: type[ModelConfig]
    layout: Callable[..., FileLayout]
    shapes: Callable[[Any], Iterator[tuple[str, tuple[int, ...]]]]
    max_context: Callable[[Any], int]
    default_context: Callable[[Any], int]
    kv_elements: Callable[[Any], int]
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
    embedding: str = "model.embed_tokens.weight",
) -> Family:
    """A family of decoders (`models/decoder/`).

    Args:
        config: class of its configurations, which have a `decoder`.
        stored: returns the table of tensors in files, if they are not one per parameter under the
            graph's names.
        prefix: of names in files.
        derived: see `FileLayout`; by default RoPE buffers of older files.
        embedding: name in files, of which a tied head may be a copy.
    """

    def layout(given: Any, *, with_head: bool) -> FileLayout:
        table, copies = tuple(stored(given.decoder)), {HEAD: embedding} if given.decoder.tied_head else {}
        found = FileLayout(table, prefix, copies=copies)
        found = found if derived is None else replace(found, derived=derived)
        if with_head:
            return found
        table = tuple(tensor for tensor in table if tensor.name != HEAD)
        return replace(found, table=table, copies={}, derived=f"{found.derived}|{re.escape(HEAD)}")

    @wraps(model.training_parts)
    def training(given: Any, *sizes: Any, **named: Any) -> ModelParts:
        return model.training_parts(given.decoder, *sizes, **named)

    @wraps(model.decoding_parts)
    def decoding(given: Any, *sizes: Any, **named: Any) -> ModelParts:
        return model.decoding_parts(given.decoder, *sizes, **named)

    def shapes(given: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        return parameter_shapes(given.decoder)

    def kv_elements(given: Any) -> int:
        return int(2 * given.decoder.kv_size * len(given.decoder.layers))

    def max_context(given: Any) -> int:
        return int(given.decoder.max_positions)

    def default_context(given: Any) -> int:
        return int(given.decoder.default_context)

    return Family(config, layout, shapes, max_context, default_context, kv_elements, training, decoding)
