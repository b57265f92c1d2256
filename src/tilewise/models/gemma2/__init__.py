"""Gemma 2: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.gemma2.gemma2_config import Gemma2Config

__all__ = ["FAMILY", "Gemma2Config"]

FAMILY = decoder_family(Gemma2Config)
