"""The schedules by name, and what each asks of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tilewise.core.errors import LayoutError
from tilewise.core.validation import Validator
from tilewise.ir.schedule import MakeSchedules
from tilewise.strategy.schedules.actions import Action, turns_of
from tilewise.strategy.schedules.gpipe import gpipe
from tilewise.strategy.schedules.interleaved import interleaved
from tilewise.strategy.schedules.one_f_one_b import one_f_one_b

__all__ = ["SCHEDULES", "ActionsOf", "actions_for", "schedules_for"]

_validate = Validator("pipeline", LayoutError)

ActionsOf = Callable[[int, int, int], tuple[tuple[Action, ...], ...]]
"""The order of each stage, from the numbers of stages, of chunks per stage, and of microbatches."""

SCHEDULES: Mapping[str, ActionsOf] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
}
"""All schedules by name."""


def actions_for(name: str, stages: int, chunks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of each stage.

    Raises:
        LayoutError: the schedule cannot have so many chunks or microbatches; names numbers that fit.
    """
    if name == "interleaved":
        if microbatches % stages:
            fitting = (microbatches // stages * stages, -(-microbatches // stages) * stages)
            _validate.invalid(
                "schedule",
                "an interleaved schedule takes microbatches through its chunks in groups as large as the number of "
                "stages",
                f"{microbatches} microbatches for {stages} stages",
                f"use {' or '.join(str(n) for n in dict.fromkeys(fitting) if n)} microbatches",
            )
    elif chunks > 1:
        _validate.invalid(
            "schedule",
            f"the schedule {name!r} has one chunk of layers per stage",
            f"{chunks}",
            'choose "interleaved", or 1 chunk',
        )
    return SCHEDULES[name](stages, chunks, microbatches)


def schedules_for(name: str, stages: int, chunks: int, microbatches: int) -> MakeSchedules:
    """The schedule of this name, for the segments of any graph.

    Raises:
        LayoutError: as `actions_for`.
    """
    return partial(turns_of, actions_for(name, stages, chunks, microbatches))
