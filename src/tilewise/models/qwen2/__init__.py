"""Qwen2: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.qwen2.qwen2_config import Qwen2Config

__all__ = ["FAMILY", "Qwen2Config"]

FAMILY = decoder_family(Qwen2Config)
