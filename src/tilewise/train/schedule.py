"""The learning rate of a step. It is a pure function of the step number, so a resumed run needs no
saved state for it.

`learning_rate` has the schedules of `optimizer.schedule`: the first step has a rate above 0, and the
last step has the lowest rate. `scheduled_rate` has those of `optimizer.lr_scheduler_type`, whose
values equal those of transformers' schedulers of the same name: the first step of a warm-up has a
rate of 0, and the rate would reach its end one step after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tilewise.core.validation import Validator, shown

__all__ = ["SCHEDULERS", "check_scheduler", "learning_rate", "scheduled_rate", "warmup_of"]

_validate = Validator("train")


def learning_rate(
    step: int, num_steps: int, top: float, warmup_steps: int, min_ratio: float, schedule: str = "cosine"
) -> float:
    """The learning rate of a step: a linear warm-up to `top`, then the schedule.

    Args:
        step: 0 for the first.
        num_steps: number of steps of the whole run.
        top: the highest rate.
        warmup_steps: steps of the warm-up.
        min_ratio: the last step's rate is `min_ratio * top`; a constant schedule does not use it.
        schedule: `constant`, `linear` or `cosine`. The last two decay from the end of the warm-up
            to the last step.
    """
    if step < warmup_steps:
        return top * (step + 1) / warmup_steps
    if schedule == "constant":
        return top
    span = max(1, num_steps - 1 - warmup_steps)
    done = min(1.0, (step - warmup_steps) / span)
    decay = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return top * (min_ratio + (1.0 - min_ratio) * decay)


def warmup_of(ratio: float, num_steps: int) -> int:
    """The steps of a warm-up that takes a share of the run, rounded up as in transformers."""
    return math.ceil(num_steps * ratio)


def scheduled_rate(
    name: str, step: int, num_steps: int, top: float, warmup_steps: int, settings: Mapping[str, Any]
) -> float:
    """The learning rate of a step as in transformers.

    Args:
        name: a scheduler of `SCHEDULERS`.
        step: 0 for the first.
        num_steps: number of steps of the whole run.
        top: the learning rate that the schedule scales.
        warmup_steps: steps of the warm-up, which `constant` does not have.
        settings: `lr_scheduler_kwargs` of transformers, checked by `check_scheduler`.
    """
    run = _Run(step, num_steps, top, warmup_steps, settings)
    return top * SCHEDULERS[name][0](run)


class _Run:
    """A step of a run, and the settings of its scheduler."""

    def __init__(
        self, step: int, num_steps: int, top: float, warmup_steps: int, settings: Mapping[str, Any]
    ) -> None:
        self.step, self.num_steps, self.top = step, num_steps, top
        self.warmup_steps, self.settings = warmup_steps, settings

    def get(self, name: str, default: Any) -> Any:
        return self.settings.get(name, default)

    @property
    def is_warming_up(self) -> bool:
        return self.step < self.warmup_steps

    @property
    def warmup(self) -> float:
        """The share of the warm-up that is done."""
        return self.step / max(1, self.warmup_steps)

    @property
    def progress(self) -> float:
        """The share of the steps after the warm-up that are done."""
        return (self.step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)

    @property
    def min_rate(self) -> float:
        """The lowest rate as a share of the highest."""
        if "min_lr" in self.settings:
            return float(self.settings["min_lr"]) / self.top
        return float(self.settings["min_lr_rate"])

    def wave(self, progress: float) -> float:
        """A cosine from 1 that makes `num_cycles` waves."""
        return 0.5 * (1.0 + math.cos(math.pi * float(self.get("num_cycles", 0.5)) * 2.0 * progress))


def _constant(run: _Run) -> float:
    return 1.0


def _constant_with_warmup(run: _Run) -> float:
    return run.warmup if run.is_warming_up else 1.0


def _linear(run: _Run) -> float:
    if run.is_warming_up:
        return run.warmup
    return max(0.0, (run.num_steps - run.step) / max(1, run.num_steps - run.warmup_steps))


def _cosine(run: _Run) -> float:
    return run.warmup if run.is_warming_up else max(0.0, run.wave(run.progress))


def _cosine_with_restarts(run: _Run) -> float:
    if run.is_warming_up:
        return run.warmup
    if run.progress >= 1.0:
        return 0.0
    position = float(run.get("num_cycles", 1)) * run.progress % 1.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * position)))


def _polynomial(run: _Run) -> float:
    if run.is_warming_up:
        return run.warmup
    end = float(run.get("lr_end", 1e-7))
    left = max(0.0, 1.0 - run.progress)
    return float(((run.top - end) * left ** float(run.get("power", 1.0)) + end) / run.top)


def _inverse_sqrt(run: _Run) -> float:
    if run.is_warming_up:
        return run.warmup
    timescale = run.get("timescale", run.warmup_steps or 10_000)
    return float(1.0 / math.sqrt((run.step + timescale - run.warmup_steps) / timescale))


def _floored(factor: float, lowest: float) -> float:
    return max(0.0, factor * (1.0 - lowest) + lowest)


def _cosine_with_min_lr(run: _Run) -> float:
    return run.warmup if run.is_warming_up else _floored(run.wave(run.progress), run.min_rate)


def _cosine_warmup_with_min_lr(run: _Run) -> float:
    if run.is_warming_up:
        first = run.get("warmup_lr_rate", None)
        if first is None:
            return (run.step + 1.0) / max(1.0, run.warmup_steps)
        return float(first + (1.0 - first) * run.step / max(1, run.warmup_steps - 1))
    progress = (run.step - run.warmup_steps + 1.0) / max(1.0, run.num_steps - run.warmup_steps)
    return _floored(run.wave(progress), run.min_rate)


def _warmup_stable_decay(run: _Run) -> float:
    lowest, decay_steps = float(run.get("min_lr_ratio", 0.0)), int(run.settings["num_decay_steps"])
    if run.is_warming_up:
        shape = run.get("warmup_type", "linear")
        if shape == "cosine":
            return _floored(0.5 * (1.0 - math.cos(math.pi * run.warmup)), lowest)
        rising = run.warmup if shape == "linear" else 1.0 - math.sqrt(1.0 - run.warmup)
        return _floored(rising, lowest)
    stable_steps = int(run.get("num_stable_steps", run.num_steps - run.warmup_steps - decay_steps))
    step = run.step - run.warmup_steps - stable_steps
    if step < 0:
        return 1.0
    if step >= decay_steps:
        return lowest
    shape, progress = run.get("decay_type", "cosine"), step / max(1, decay_steps)
    if shape == "cosine":
        return _floored(run.wave(progress), lowest)
    return _floored(1.0 - (progress if shape == "linear" else math.sqrt(progress)), lowest)


_MIN_LR = ("num_cycles", "min_lr", "min_lr_rate")
SCHEDULERS: Mapping[str, tuple[Callable[[_Run], float], tuple[str, ...]]] = {
    "constant": (_constant, ()),
    "constant_with_warmup": (_constant_with_warmup, ()),
    "linear": (_linear, ()),
    "cosine": (_cosine, ("num_cycles",)),
    "cosine_with_restarts": (_cosine_with_restarts, ("num_cycles",)),
    "polynomial": (_polynomial, ("lr_end", "power")),
    "inverse_sqrt": (_inverse_sqrt, ("timescale",)),
    "cosine_with_min_lr": (_cosine_with_min_lr, _MIN_LR),
    "cosine_warmup_with_min_lr": (_cosine_warmup_with_min_lr, (*_MIN_LR, "warmup_lr_rate")),
    "warmup_stable_decay": (
        _warmup_stable_decay,
        ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""By transformers' names: the factor of the learning rate, and the names of its `lr_scheduler_kwargs`."""

_WORDS = {"warmup_type": ("linear", "cosine", "1-sqrt"), "decay_type": ("linear", "cosine", "1-sqrt")}
_COUNTS = ("num_decay_steps", "num_stable_steps", "timescale")
_SHARES = ("min_lr_rate", "warmup_lr_rate", "min_lr_ratio")
_MOST_STEPS, _MOST = 10**9, 1e6


def check_scheduler(name: str, top: float, settings: Mapping[str, object]) -> None:
    """Check the `lr_scheduler_kwargs` of a scheduler.

    Args:
        name: of `SCHEDULERS`.
        top: the learning rate that the schedule scales.
        settings: by name.

    Raises:
        ConfigError: the scheduler does not have a setting, needs one, or one is out of range.
    """
    names = SCHEDULERS[name][1]
    for key, value in settings.items():
        if key not in names:
            has = f"it has {', '.join(names)}" if names else "it has no settings"
            _validate.invalid("config", f"{name} must know each of lr_scheduler_kwargs", key, has)
        if key in _WORDS:
            _validate.choice("config", key, value, _WORDS[key])
        elif key in _COUNTS:
            _validate.integer("config", key, value, 1 if key == "timescale" else 0, _MOST_STEPS)
        else:
            _validate.number("config", key, value, 0.0, 1.0 if key in _SHARES else _MOST)
    if "min_lr" in names and ("min_lr" in settings) == ("min_lr_rate" in settings):
        got = "both" if "min_lr" in settings else "neither"
        _validate.invalid(
            "config", f"{name} must have min_lr or min_lr_rate in lr_scheduler_kwargs", got, "set one"
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in settings:
        advice = "set lr_scheduler_kwargs = { num_decay_steps = 100 }"
        _validate.invalid("config", f"{name} must have num_decay_steps", "none", advice)
    end = settings.get("lr_end", 1e-7)
    if name == "polynomial" and not top > end:  # type: ignore[operator]  # a number, checked above
        _validate.invalid("config", "lr_end must be below optimizer.lr", shown(end), "lower it")
