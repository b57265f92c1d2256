"""What all families that write have in common: one description of what can be chosen, and the graphs of any choice."""

from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rope import Rope, rope_table

__all__ = ["Decoder", "LayerKind", "Rope", "rope_table"]
