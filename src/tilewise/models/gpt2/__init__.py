"""GPT-2: its configuration and the names in its files. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.gpt2.gpt2_config import GPT2Config
from tilewise.models.gpt2.weights import DERIVED, stored_conv

__all__ = ["DERIVED", "FAMILY", "GPT2Config", "stored_conv"]

FAMILY = decoder_family(
    GPT2Config, stored_conv, prefix="transformer.", derived=DERIVED, embedding="transformer.wte.weight"
)
