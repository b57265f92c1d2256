"""Pipeline schedules as data: per stage, the order of forward and backward passes. A file per
schedule.

    F(v, k)   the forward pass of virtual stage v for microbatch k
    B(v, k)   its backward pass

With p stages, the devices of stage s run the virtual stages s, s + p, s + 2p and so on. A schedule
states only this order. What each stage receives before an action and sends after it follows from
the graph (`turns_of`).
"""

from tilewise.strategy.schedules.actions import Action, turns_of
from tilewise.strategy.schedules.one_stage import one_stage
from tilewise.strategy.schedules.table import SCHEDULES, ActionsOf, actions_for, schedules_for

__all__ = ["SCHEDULES", "Action", "ActionsOf", "actions_for", "one_stage", "schedules_for", "turns_of"]
