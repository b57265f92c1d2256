"""The common part of all decoder families: one description of their choices, and the graphs of every
combination.
"""

from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rope import Rope, rope_table

__all__ = ["Decoder", "LayerKind", "Rope", "rope_table"]
