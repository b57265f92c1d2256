"""Validates a plan, whether made here or read from a file: applies the rules of `ir.validate` to
its tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.ir.validate import Values, validate_acknowledgements, validate_reductions
from tilewise.plan.tables import PlanTables

__all__ = ["validate_plan"]


def validate_plan(plan: PlanTables, values: Mapping[int, Values] | None = None) -> None:
    """Check the program against the layouts' pending reductions. Inputs and persistent state count
    as written before the run.

    Args:
        plan: new, or read from a file.
        values: what templates read and write, by number, for those that were checked when they were
            lowered.

    Raises:
        InternalError: names the op or instruction that violates a rule.
    """
    validate_acknowledgements(plan.program)
    kinds = {t.id: t.kind for t in plan.graph.tensors}
    written = frozenset(e for t, entries in plan.outside.items() if kinds[t] != "result" for e in entries)
    validate_reductions(plan.program, plan.layouts, written, {"backward": ("forward",)}, values)
