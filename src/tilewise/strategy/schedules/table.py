"""The schedules by name, and the order of each stage from a name or from a user's passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tilewise.core.errors import LayoutError
from tilewise.core.tree import allowed_widths
from tilewise.core.validation import Validator
from tilewise.ir.schedule import MakeSchedules
from tilewise.strategy.schedules.actions import Action, turns_of
from tilewise.strategy.schedules.check import check_actions
from tilewise.strategy.schedules.csv_file import parse_actions
from tilewise.strategy.schedules.gpipe import gpipe
from tilewise.strategy.schedules.interleaved import interleaved
from tilewise.strategy.schedules.one_f_one_b import one_f_one_b
from tilewise.strategy.schedules.zero_bubble import zero_bubble

__all__ = [
    "FORWARD_ONLY",
    "SCHEDULES",
    "SPLITTING",
    "actions_for",
    "microbatches_for",
    "require_chunks",
    "schedules_for",
]

_validate = Validator("schedule", LayoutError)

SCHEDULES: Mapping[str, Callable[[int, int, int], tuple[tuple[Action, ...], ...]]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
"""The order of each stage by the schedule's name, from the numbers of stages, of chunks per stage, and of
microbatches."""

FORWARD_ONLY = "forward"
"""The order of a graph without a backward pass, whatever the schedule of training is."""

SPLITTING = frozenset(("zero_bubble",))
"""Schedules that run the backward pass in two parts."""


def require_chunks(name: str, chunks: int) -> None:
    """Check that a schedule can have several chunks of layers per stage.

    Raises:
        LayoutError: it cannot.
    """
    if chunks > 1 and name != "interleaved":
        _validate.invalid(
            "chunks",
            f"the schedule {name!r} has one chunk of layers per stage",
            f"{chunks}",
            'choose "interleaved", or 1 chunk',
        )


def actions_for(
    schedule: str | Sequence[Sequence[str]], stages: int, chunks: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """The order of each stage.

    Args:
        schedule: the name of a schedule, or the passes of each stage.

    Raises:
        LayoutError: the schedule cannot have so many chunks or microbatches, which it then names
            numbers that fit; or passes are not a schedule (`check_actions`).
    """
    if schedule == FORWARD_ONLY:
        return tuple(
            tuple(
                Action("F", stage + chunk * stages, k) for chunk in range(chunks) for k in range(microbatches)
            )
            for stage in range(stages)
        )
    if not isinstance(schedule, str):
        if len(schedule) != stages:
            _validate.invalid(
                "read",
                "a schedule must have a row per stage",
                f"{len(schedule)} rows for {stages}",
                "change the mesh",
            )
        actions = parse_actions(schedule)
        own = max((a.microbatch for row in actions for a in row), default=-1) + 1
        if own != microbatches:
            _validate.invalid(
                "microbatches",
                "a step must have as many microbatches as its schedule",
                f"{microbatches}, and {own} in the schedule",
                f"set accumulation = {own}",
            )
        check_actions(actions, chunks, microbatches)
        return actions
    require_chunks(schedule, chunks)
    if schedule == "interleaved" and microbatches % stages:
        fitting = (microbatches // stages * stages, -(-microbatches // stages) * stages)
        _validate.invalid(
            "microbatches",
            "an interleaved schedule takes as many microbatches at a time through its chunks as there are stages",
            f"{microbatches} microbatches for {stages} stages",
            f"use {' or '.join(str(n) for n in dict.fromkeys(fitting) if n)} microbatches, "
            "which the batch and batch splits must be multiples of",
        )
    return SCHEDULES[schedule](stages, chunks, microbatches)


def schedules_for(
    schedule: str | Sequence[Sequence[str]], stages: int, chunks: int, microbatches: int
) -> MakeSchedules:
    """The order of each stage, for the segments of any graph.

    Raises:
        LayoutError: as `actions_for`.
    """
    return partial(turns_of, actions_for(schedule, stages, chunks, microbatches))


def microbatches_for(
    schedule: str | Sequence[Sequence[str]], stages: int, batch_splits: int, sharing: int, least: int = 1
) -> int:
    """The default number of microbatches of a step with a pipeline: as many as there are stages, or the
    next number with which the batch can be divided. An interleaved schedule needs a multiple of the stages.

    Args:
        schedule: the order of passes, as in `actions_for`.
        batch_splits: number of parts of the batch that are summed separately.
        sharing: number of devices that share the batch.
        least: the smallest number that is wanted, if possible.
    """
    possible = [width // sharing for width in allowed_widths(batch_splits) if width % sharing == 0]
    multiple = stages if schedule == "interleaved" else 1
    fitting = [number for number in possible if number % multiple == 0] or possible
    wanted = max(stages, least)
    return next((number for number in fitting if number >= wanted), max(fitting, default=1))
