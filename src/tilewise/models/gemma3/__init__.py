"""Gemma 3 for text: its configuration, and its place in the files of models with images. It uses the
graph of all decoders.
"""

from tilewise.models.family import decoder_family
from tilewise.models.gemma3.gemma3_config import Gemma3Config
from tilewise.models.gemma3.weights import INSIDE, VISION

__all__ = ["FAMILY", "INSIDE", "VISION", "Gemma3Config"]

FAMILY = decoder_family(Gemma3Config, inside=INSIDE, others=VISION)
