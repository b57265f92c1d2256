"""The place stage: offsets of all buffers."""

from tilewise.plan.place.buffers import carry_or_ring_key, category_of, own_key
from tilewise.plan.place.placement import Placement, place

__all__ = ["Placement", "carry_or_ring_key", "category_of", "own_key", "place"]
