"""What every plan is held to, made here or read from a file: the rules of `ir.validate` on its tables."""

from __future__ import annotations

from tilewise.ir.validate import validate_acknowledgements, validate_reductions
from tilewise.plan.tables import PlanTables

__all__ = ["validate_plan"]


def validate_plan(plan: PlanTables) -> None:
    """Hold the program to the layouts' records; what users write, and what steps keep, is there beforehand.

    Raises:
        InternalError: names the op or instruction that breaks a rule.
    """
    validate_acknowledgements(plan.program)
    kinds = {t.id: t.kind for t in plan.graph.tensors}
    given = frozenset(e for t, entries in plan.outside.items() if kinds[t] != "result" for e in entries)
    validate_reductions(plan.program, plan.layouts, given, {"backward": ("forward",)})
