"""How many bytes a model's weights and KV cache take, and how many of them one new token reads.

`tilewise inspect` and the table of published models in docs/models.md use this arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tilewise.models.decoder.weights import HEAD
from tilewise.models.model_config import ModelConfig
from tilewise.models.registry import default_context, is_encoder, kv_bytes_per_token, parameter_shapes

__all__ = ["Footprint", "footprint"]

_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model, and what follows from them on a device.

    Attributes:
        weights: bytes of all weights.
        read: bytes of weights that one new token reads.
        per_token: bytes of the KV cache per token; 0 for encoders.
        context: the default context limit in tokens.
    """

    weights: int
    read: int
    per_token: int
    context: int

    def cached_tokens(self, memory: int) -> int:
        """The number of tokens whose KV cache fits next to the weights.

        Args:
            memory: bytes of the device.
        """
        return max(0, memory - self.weights) // self.per_token

    def tokens_per_second(self, bandwidth: float) -> float:
        """An upper bound of the speed of decoding one text: each token reads the weights once.

        Args:
            bandwidth: bytes per second from memory.
        """
        return bandwidth / self.read


def footprint(
    config: ModelConfig,
    *,
    bits: float = 16,
    matrix_bits: float | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    num_bytes: Mapping[str, int] | None = None,
) -> Footprint:
    """The bytes of a model.

    A separate embedding is not read: a token needs one row of it. An embedding that is also the head
    is read like a matrix.

    Args:
        config: of the model.
        bits: of elements of the KV cache and of weights.
        matrix_bits: of elements of matrices in layers and of a separate head; by default `bits`.
        shapes: of the parameters; by default those that the configuration describes.
        num_bytes: bytes of quantised weights, by name.
    """
    shapes = dict(parameter_shapes(config)) if shapes is None else shapes
    matrix_bits = bits if matrix_bits is None else matrix_bits

    def size(name: str, shape: tuple[int, ...]) -> float:
        if num_bytes is not None and name in num_bytes:
            return num_bytes[name]
        is_matrix = len(shape) > 1 and not name.startswith("embed")
        return prod(shape) * (matrix_bits if is_matrix else bits) / 8

    weights = sum(size(name, shape) for name, shape in shapes.items())
    is_tied = HEAD not in shapes and not is_encoder(config)
    read = weights if is_tied else weights - size(_EMBEDDING, shapes[_EMBEDDING])
    per_token = kv_bytes_per_token(config, bits / 8)
    return Footprint(int(weights), int(read), int(per_token), default_context(config))
