"""Phi-3: its configuration and the fused tensors of its files. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.phi3.phi3_config import Phi3Config
from tilewise.models.phi3.weights import stored_fused

__all__ = ["FAMILY", "Phi3Config", "stored_fused"]

FAMILY = decoder_family(Phi3Config, stored_fused)
