"""Qwen3: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.qwen3.qwen3_config import Qwen3Config

__all__ = ["FAMILY", "Qwen3Config"]

FAMILY = decoder_family(Qwen3Config)
