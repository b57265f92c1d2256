"""Everything that is decided before a run: tiles, memory, order and communication."""

from tilewise.plan.make import make_plan
from tilewise.plan.schedule import choose_prefetched, schedule_graph
from tilewise.plan.settings import settings_for
from tilewise.plan.shapes import LocalShapes, PlanSettings, check_sizes, symbols_of
from tilewise.plan.tables import PlanTables

__all__ = [
    "LocalShapes",
    "PlanSettings",
    "PlanTables",
    "check_sizes",
    "choose_prefetched",
    "make_plan",
    "schedule_graph",
    "settings_for",
    "symbols_of",
]
