"""GPT-2: what its configurations ask for, and its files' names; its graph is the one of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.gpt2.config import GPT2Config
from tilewise.models.gpt2.weights import DERIVED, stored_conv

__all__ = ["FAMILY", "GPT2Config"]

FAMILY = decoder_family(
    GPT2Config, stored_conv, prefix="transformer.", derived=DERIVED, embedding="transformer.wte.weight"
)
