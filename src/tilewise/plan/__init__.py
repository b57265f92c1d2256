"""Deciding before running: tiles, memory, order, communication."""

from tilewise.plan.make import make_plan
from tilewise.plan.plan import Plan
from tilewise.plan.settings import settings_for

__all__ = ["Plan", "make_plan", "settings_for"]
