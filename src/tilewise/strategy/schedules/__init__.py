"""Pipeline schedules as data: per stage, the order of forward and backward passes. A file per
schedule.

    F(v, k)   the forward pass of virtual stage v for microbatch k
    B(v, k)   its backward pass; or in two parts:
    I(v, k)   gradients of its input, for which the stage before waits
    W(v, k)   gradients of its weights

With p stages, the devices of stage s run the virtual stages s, s + p, s + 2p and so on. A schedule
states only this order. What each stage receives before an action and sends after it follows from
the graph (`turns_of`).
"""

from tilewise.strategy.schedules.actions import Action, turns_of
from tilewise.strategy.schedules.csv_file import parse_actions, read_actions, write_actions
from tilewise.strategy.schedules.one_stage import one_stage
from tilewise.strategy.schedules.table import (
    FORWARD_ONLY,
    SCHEDULES,
    SPLITTING,
    actions_for,
    microbatches_for,
    require_chunks,
    schedules_for,
)

__all__ = [
    "FORWARD_ONLY",
    "SCHEDULES",
    "SPLITTING",
    "Action",
    "actions_for",
    "microbatches_for",
    "one_stage",
    "parse_actions",
    "read_actions",
    "require_chunks",
    "schedules_for",
    "turns_of",
    "write_actions",
]
