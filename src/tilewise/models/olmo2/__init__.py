"""OLMo 2: its configuration. It uses the graph of all decoders."""

from tilewise.models.family import decoder_family
from tilewise.models.olmo2.olmo2_config import Olmo2Config

__all__ = ["FAMILY", "Olmo2Config"]

FAMILY = decoder_family(Olmo2Config)
