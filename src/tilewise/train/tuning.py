"""Searches for the fastest settings on this machine, by running and timing steps. It tries only
settings that change no bit of the result.

There are three searches, each of which starts from the fastest settings so far: meshes,
microbatches, and tile sizes. A mesh is tried with the fewest memory savings that make it fit. Then
the fastest settings and the original configuration are timed in turns. Tokens are random
(`RandomBatches`), and weights have their initial values. Losses and gradient norms of all trials
must be equal to the bit; a difference is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tilewise.core import InternalError, LayoutError, PlanError, ResourceError, TilewiseError, Validator
from tilewise.core.sizes import format_bytes
from tilewise.files.writing import writing
from tilewise.train.alternatives import (
    describe_settings,
    larger_and_smaller_tiles,
    memory_ladder,
    other_meshes,
    with_more_microbatches,
)
from tilewise.train.random_batches import RandomBatches
from tilewise.train.train_config import TrainConfig, make_model_config
from tilewise.train.trainer import make_plan, rate_of

if TYPE_CHECKING:
    from tilewise.session import ComputeGraph, Plan

__all__ = ["Trial", "Tuning", "tune_run"]

_MOST_STEPS = 10**6
_MOST_SECONDS = 1e6
_ROUNDS = 3  # turns of the fastest and the original configuration
_LEAST_GAIN = 1.01  # smaller gains may be noise
_validate = Validator("train")


@dataclass(frozen=True)
class Trial:
    """Steps that were run and timed under some settings.

    Attributes:
        config: the settings.
        memory_bytes: planned memory of all devices.
        tokens_per_s: speed over all steps except the first.
        losses: per step, the loss and the norm of all gradients.
    """

    config: TrainConfig
    memory_bytes: int
    tokens_per_s: float
    losses: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Tuning:
    """The result of tuning.

    Attributes:
        best: the fastest settings. This is the original configuration, unless another one was
            faster when the two were timed in turns.
        gain: the speed of the best settings relative to the original configuration, as the median
            over turns. None if the original configuration cannot run here.
        trials: all trials in the order in which they ran.
        num_untried: number of settings that were not tried because the time was over.
    """

    best: Trial
    gain: float | None
    trials: tuple[Trial, ...]
    num_untried: int


def tune_run(config: TrainConfig, num_steps: int, seconds: float, report: Callable[[str], None]) -> Tuning:
    """Run steps of a configuration under settings that change no bit, and find the fastest.

    Args:
        num_steps: timed steps of every trial, after one that is not timed.
        seconds: no further settings are tried after this time.
        report: called with one line per trial.

    Raises:
        PlanError, LayoutError: no strategy that was tried is possible for this model.
        ResourceError: nothing fits into this machine's memory.
        NotFinite: a loss is not finite.
    """
    num_steps = _validate.integer("tune", "steps", num_steps, 1, _MOST_STEPS)
    seconds = _validate.number("tune", "seconds", seconds, 0, _MOST_SECONDS)
    return _Search(config, num_steps, seconds, report).run()


class _Search:
    """The trials so far, and the remaining time."""

    def __init__(
        self, config: TrainConfig, num_steps: int, seconds: float, report: Callable[[str], None]
    ) -> None:
        self._config, self._num_steps, self._report = config, num_steps, report
        self._batches = RandomBatches(config, num_steps + 1)
        self._end = time.monotonic() + seconds
        self._trials: dict[object, Trial] = {}  # by the settings of their plan
        self._planning_error: TilewiseError | None = None
        self._num_untried = 0

    def run(self) -> Tuning:
        original = self._try([self._config], must_run=True)
        for other in other_meshes(self._config):
            self._try(memory_ladder(other), must_run=not self._trials)
        if not self._trials:
            assert self._planning_error is not None  # at least one configuration was tried
            raise self._planning_error
        self._try([with_more_microbatches(self._best().config)])
        for other in larger_and_smaller_tiles(self._best().config):
            self._try([other])
        best = self._best()
        gain = None if original is None else self._times_as_fast(best, original)
        if original is not None and gain is not None and gain < _LEAST_GAIN:
            best, gain = original, 1.0
        return Tuning(best, gain, tuple(self._trials.values()), self._num_untried)

    def _best(self) -> Trial:
        return max(self._trials.values(), key=lambda trial: trial.tokens_per_s)

    def _try(self, configs: Iterable[TrainConfig], must_run: bool = False) -> Trial | None:
        """Run the first settings that can be planned, unless they ran before. None if no settings
        can be planned, or no time is left.
        """
        refusals: list[tuple[TrainConfig, TilewiseError]] = []
        for config in configs:
            if not must_run and time.monotonic() >= self._end:
                self._num_untried += 1
                return None
            try:
                graph, plan = make_plan(config)
            except (PlanError, LayoutError, ResourceError) as error:
                refusals.append((config, error))
                continue
            return self._run_once(config, graph, plan)
        refused, reason = refusals[0]
        self._planning_error = self._planning_error or reason
        self._report(f"rejected: {describe_settings(refused)}: {str(reason).partition(';')[0]}")
        return None

    def _run_once(self, config: TrainConfig, graph: ComputeGraph, plan: Plan) -> Trial:
        distribution, train = config.distribution, config.train
        mesh, workers = tuple(distribution.mesh.items()), plan.settings.workers_per_device
        key = mesh, workers, train.accumulation, train.recompute, plan.settings.row_tile
        if key not in self._trials:
            trial = self._trials[key] = self._run(config, graph, plan)
            first = next(iter(self._trials.values()))
            self._report(
                f"{trial.tokens_per_s:9,.0f} tokens/s  {trial.tokens_per_s / first.tokens_per_s:6.3f}  "
                f"{format_bytes(trial.memory_bytes):>10}  {describe_settings(config)}"
            )
        return self._trials[key]

    def _run(self, config: TrainConfig, graph: ComputeGraph, plan: Plan) -> Trial:
        """Run some steps from initial weights.

        Raises:
            InternalError: losses or norms differ from those of other trials.
        """
        where = config.output.offload_directory
        if where is not None and plan.file_bytes:
            with writing(Path(where)):
                Path(where).mkdir(parents=True, exist_ok=True)
        losses, num_tokens, seconds = list[tuple[float, float]](), 0, 0.0
        with graph.instantiate(plan, offload_directory=where) as instance:
            instance.initialize(seed=config.train.seed, scale=make_model_config(config).initializer_range)
            for number, batch in enumerate(self._batches):
                started = time.perf_counter()
                result = instance.step(batch, lr=rate_of(config, number))
                if number > 0:  # the first step also allocates memory pages
                    seconds += time.perf_counter() - started
                    num_tokens += batch["tokens"].size
                losses.append((result.loss, result.grad_norm))
        memory_bytes = plan.total_bytes + sum(plan.checkpoint_bytes)
        trial = Trial(config, memory_bytes, num_tokens / seconds, tuple(losses))
        first = next(iter(self._trials.values()), trial)
        if trial.losses != first.losses:
            raise InternalError(
                f"[train.tune] losses and norms must be bit-identical under all settings; got {trial.losses} with "
                f"{describe_settings(config)} and {first.losses} with {describe_settings(first.config)}; please report "
                "the configuration"
            )
        return trial

    def _times_as_fast(self, best: Trial, original: Trial) -> float:
        """How many times as fast `best` is as `original`: the median over turns. Both are timed in
        turns, so that a busy machine affects both alike.
        """
        if best is original:
            return 1.0
        self._report("measuring the fastest and the original settings in turns")
        ratios = []
        for _ in range(_ROUNDS):
            rates = [self._run(t.config, *make_plan(t.config)).tokens_per_s for t in (original, best)]
            ratios.append(rates[1] / rates[0])
        return median(ratios)
