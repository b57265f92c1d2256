"""Phi-3: what its configurations ask for, and its files' fused tensors; its graph is the one of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.phi3.config import Phi3Config
from tilewise.models.phi3.weights import stored_fused

__all__ = ["FAMILY", "Phi3Config"]

FAMILY = decoder_family(Phi3Config, stored_fused)
