"""Granite: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.granite.granite_config import GraniteConfig

__all__ = ["FAMILY", "GraniteConfig"]

FAMILY = decoder_family(GraniteConfig)
