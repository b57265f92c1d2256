"""Llama: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.llama.llama_config import LlamaConfig

__all__ = ["FAMILY", "LlamaConfig"]

FAMILY = decoder_family(LlamaConfig)
