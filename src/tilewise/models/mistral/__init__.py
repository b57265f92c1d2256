"""Mistral: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.mistral.mistral_config import MistralConfig

__all__ = ["FAMILY", "MistralConfig"]

FAMILY = decoder_family(MistralConfig)
