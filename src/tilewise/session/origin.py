"""Checks that a plan is the one that planning makes of its graph and layout. The checks of
`Plan.load` cannot show this.

`Plan.load` checks the tables against rules. No rule says what each integer of a kernel means; only
lowering determines it. So the plan is made again from the graph, layout and settings that it
contains, and compared.
"""

from __future__ import annotations

from tilewise.core.errors import PlanError, TilewiseError
from tilewise.core.validation import Validator, shown
from tilewise.plan import Plan, make_plan
from tilewise.session.assemble import device_overhead
from tilewise.strategy import one_stage

__all__ = ["require_origin"]

_validate = Validator("session", PlanError)


def require_origin(plan: Plan) -> None:
    """Reject a plan with a program that planning would not make; use it for files of untrusted
    authors.

    It takes as long as planning without gradients and layout.

    Args:
        plan: for example the result of `Plan.load`.

    Raises:
        PlanError: it is not a plan, planning its graph, layout and settings gives another program,
            or they cannot be planned.
    """
    _validate.instance("require_origin", "a plan", plan, Plan, "pass what Plan.load returned")
    rule, advice = "a plan must be what planning makes of its graph and layout", "plan the graph again"
    try:
        made = make_plan(
            plan.graph,
            plan.layout,
            plan.settings,
            one_stage,
            plan.optimizer,
            device_overhead,
            definition=plan.definition,
        )
        is_same = made.digest() == plan.digest()
    except TilewiseError as error:
        _validate.invalid("require_origin", rule, f"none: {error}", advice)
    except Exception as error:  # a layout that no strategy makes
        _validate.invalid("require_origin", rule, f"none: {type(error).__name__} {shown(error)}", advice)
    if not is_same:
        _validate.invalid("require_origin", rule, f"another one for {plan.graph.name!r}", advice)
