"""Checks a schedule before a graph is laid out: every pass is there once, microbatches are in order,
and no stage waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tilewise.core.errors import LayoutError
from tilewise.core.validation import Validator
from tilewise.strategy.schedules.actions import Action

__all__ = ["check_actions"]

_validate = Validator("strategy", LayoutError)


def check_actions(actions: Sequence[Sequence[Action]], chunks: int, microbatches: int) -> None:
    """Check the order of each stage.

    Sums over microbatches are added in ascending order on every mesh, so that results have the same
    bits. So each virtual stage must process microbatches in this order.

    Args:
        actions: the order of each stage.
        chunks: virtual stages per stage.
        microbatches: number of microbatches.

    Raises:
        LayoutError: a pass is missing, there twice or on another stage; two microbatches are not in
            ascending order, which it names; or some passes wait for each other, which it names.
    """
    num_stages = len(actions)
    for stage, own in enumerate(actions):
        for action in own:
            if action.stage % num_stages != stage or action.stage >= num_stages * chunks:
                fitting = ", ".join(str(stage + c * num_stages) for c in range(chunks))
                _validate.invalid(
                    "schedule",
                    "a stage must run its own virtual stages",
                    f"{action} on stage {stage}",
                    f"it has {fitting}",
                )
        for chunk in range(chunks):
            _check_virtual_stage(
                [a for a in own if a.stage == stage + chunk * num_stages], stage, microbatches
            )
    _check_waits(actions, num_stages * chunks)


def _check_virtual_stage(own: Sequence[Action], stage: int, microbatches: int) -> None:
    """Every microbatch is there once, in ascending order."""
    wanted = list(range(microbatches))
    for kinds, what in (("F", "forward"), ("BI", "backward"), ("BW", "backward")):
        order = [a for a in own if a.kind in kinds]
        if sorted(a.microbatch for a in order) != wanted:
            numbers = [a.microbatch for a in order]
            odd = next((k for k in wanted if numbers.count(k) != 1), numbers[-1] if numbers else 0)
            name = " or ".join(f"{own[0].stage if own else stage}{kind}{odd}" for kind in kinds)
            _validate.invalid(
                "schedule",
                f"every stage must run one {what} pass of {microbatches} microbatches",
                f"{name} {numbers.count(odd)} times on stage {stage}",
                "add or remove it",
            )
        for before, after in pairwise(order):
            if before.microbatch > after.microbatch:
                _validate.invalid(
                    "schedule",
                    "microbatches must be in ascending order, in which their sums are added on one device",
                    f"{before} before {after}",
                    "exchange them",
                )


def _needed_by(action: Action, split: frozenset[Action], last: int) -> list[Action]:
    """The passes that must be complete before one begins."""
    kind, stage, k = action
    if kind == "F":
        return [Action("F", stage - 1, k)] if stage else []
    if kind == "W":
        return [Action("I", stage, k)]
    needed = [Action("F", stage, k)]
    if stage < last:
        after = Action("I", stage + 1, k)
        needed.append(after if after in split else Action("B", stage + 1, k))
    return needed


def _check_waits(actions: Sequence[Sequence[Action]], virtual_stages: int) -> None:
    """Run all stages; if none can go on, name what waits for what."""
    split = frozenset(a for own in actions for a in own if a.kind == "I")
    done: set[Action] = set()
    at = [0] * len(actions)
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, own in enumerate(actions):
            while at[stage] < len(own) and done.issuperset(
                _needed_by(own[at[stage]], split, virtual_stages - 1)
            ):
                done.add(own[at[stage]])
                at[stage] += 1
                is_moving = True
    waiting = [s for s, own in enumerate(actions) if at[s] < len(own)]
    if not waiting:
        return
    stage = waiting[0]
    steps: list[str] = []
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        head = actions[stage][at[stage]]
        missing = next(a for a in _needed_by(head, split, virtual_stages - 1) if a not in done)
        following = missing.stage % len(actions)
        first = actions[following][at[following]]
        steps.append(
            f"{head} waits for {missing}" + (f", which comes after {first}" if missing != first else "")
        )
        stage = following
    cycle = steps[seen.index(stage) :]
    _validate.invalid(
        "schedule", "no pass may wait for itself", "; ".join(cycle), "change the order of these stages"
    )
