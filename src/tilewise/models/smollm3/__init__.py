"""SmolLM3: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.smollm3.smollm3_config import SmolLM3Config

__all__ = ["FAMILY", "SmolLM3Config"]

FAMILY = decoder_family(SmolLM3Config)
