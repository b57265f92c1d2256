"""Everything that is decided before a run: tiles, memory, order and communication."""

from tilewise.plan.make import make_plan
from tilewise.plan.plan import Plan
from tilewise.plan.prefetched_states import choose_prefetched
from tilewise.plan.settings import settings_for
from tilewise.plan.shapes import LocalShapes, check_sizes, symbols_of

__all__ = [
    "LocalShapes",
    "Plan",
    "check_sizes",
    "choose_prefetched",
    "make_plan",
    "settings_for",
    "symbols_of",
]
