"""Deciding before running: tiles, memory, order, communication."""

from tilewise.plan.plan import Plan, make_plan, settings_for

__all__ = ["Plan", "make_plan", "settings_for"]
