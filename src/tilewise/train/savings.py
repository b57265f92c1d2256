"""Searches for settings that need less memory and change no bit of the result. It only makes plans.

`find_savings` changes one setting of a configuration at a time, then several. It makes a plan of
each changed configuration, and reports the memory that the plan needs. It allocates nothing and
reads no data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewise.core import LayoutError, PlanError
from tilewise.core.tree import allowed_widths
from tilewise.train.train_config import DistributionSection, TrainConfig
from tilewise.train.trainer import make_plan

__all__ = ["Saving", "find_savings", "need_of_all", "need_per_device"]

_MOST_DEVICES = 64  # maximum number of devices to try


@dataclass(frozen=True)
class Saving:
    """A change of settings that needs less memory.

    Attributes:
        settings: the changed settings, in the notation of `--set`.
        need_bytes: memory that the run then needs.
        fits: whether this memory is within the limit.
    """

    settings: tuple[str, ...]
    need_bytes: int
    fits: bool


@dataclass(frozen=True)
class _Change:
    settings: tuple[str, ...]
    apply: Callable[[TrainConfig], TrainConfig]


def find_savings(
    config: TrainConfig,
    need_of: Callable[[TrainConfig], int],
    limit_bytes: int,
    *,
    more_devices: bool,
    report: Callable[[str], None] = lambda text: None,
) -> list[Saving]:
    """Search for changes that make a configuration fit in memory.

    Args:
        config: a configuration that does not fit.
        need_of: plans a configuration, and returns the bytes to compare with the limit. PlanError
            and LayoutError mean that the change is not possible here.
        limit_bytes: the limit.
        more_devices: whether to try more devices, each with its own memory.
        report: called with the settings that are tried next.

    Returns:
        For each kind of change, the cheapest change that fits, or the one that needs the least
        memory if none fits. If no single change fits, also the smallest combination of kinds that
        fits; if no combination fits, the combination of all kinds.
    """
    savings: list[Saving] = []
    strongest: list[_Change] = []
    for kind in _kinds_of_changes(config, more_devices):
        tried: list[tuple[Saving, _Change]] = []
        for change in kind:
            saving = _try(config, [change], need_of, limit_bytes, report)
            if saving is not None:
                tried.append((saving, change))
            if saving is not None and saving.fits:
                break
        if tried:
            best = min(tried, key=lambda pair: (not pair[0].fits, pair[0].need_bytes))
            savings.append(best[0])
            strongest.append(best[1])
    if any(saving.fits for saving in savings):
        return savings
    together = None
    for count in range(2, len(strongest) + 1):
        saving = _try(config, strongest[:count], need_of, limit_bytes, report)
        together = saving or together
        if saving is not None and saving.fits:
            break
    return savings if together is None else [*savings, together]


def _try(
    config: TrainConfig,
    changes: list[_Change],
    need_of: Callable[[TrainConfig], int],
    limit_bytes: int,
    report: Callable[[str], None],
) -> Saving | None:
    """The saving of some changes; None if the changes are not possible."""
    settings = tuple(setting for change in changes for setting in change.settings)
    report(" ".join(settings))
    for change in changes:
        config = change.apply(config)
    try:
        need = need_of(config)
    except (PlanError, LayoutError):
        return None
    return Saving(settings, need, need <= limit_bytes)


def need_per_device(config: TrainConfig) -> int:
    """Bytes that the device with the largest share of a plan needs."""
    plan = make_plan(config, must_fit=False)[1]
    return max(device["total"] for device in plan.estimate_memory_usage())


def need_of_all(config: TrainConfig) -> int:
    """Bytes that all devices of a plan need together."""
    plan = make_plan(config, must_fit=False)[1]
    return sum(device["total"] for device in plan.estimate_memory_usage())


def _kinds_of_changes(config: TrainConfig, more_devices: bool) -> Iterator[list[_Change]]:
    """Changes by kind; within a kind, from the cheapest in time to the one that saves most."""
    train, distribution = config.train, config.distribution
    if config.output.checkpoint_in_background:
        yield [_of("output", checkpoint_in_background=False)]
    words = ["none", "selective", "full"]
    if train.recompute in words:
        yield [_of("train", recompute=word) for word in words[words.index(train.recompute) + 1 :]]
    widths = allowed_widths(train.batch_splits)
    shared = distribution.mesh.get("dp", 1) * distribution.mesh.get("fsdp", 1)
    blocks = [width for width in widths if width > train.accumulation * shared and width % shared == 0]
    yield [_of("train", accumulation=width // shared) for width in blocks]
    if train.offload == "none":
        yield [_of("train", offload=kinds) for kinds in ("optimizer", ("optimizer", "parameters"))]
    tp = distribution.mesh.get("tp", 1)
    if distribution.mesh.get("dp", 1) > 1:
        yield [_sharded(shared, tp)]
    if more_devices:
        fitting = (width for width in widths if width > shared and train.accumulation * width in widths)
        yield [_sharded(width, tp) for width in fitting if width * tp <= _MOST_DEVICES]


def _of(section: str, **values: object) -> _Change:
    """A change of keys of one section."""
    texts = {k: json.dumps(v) if isinstance(v, tuple) else str(v).lower() for k, v in values.items()}
    settings = tuple(f"{section}.{key}={text}" for key, text in texts.items())

    def apply(config: TrainConfig) -> TrainConfig:
        section_values = getattr(config, section).model_copy(update=values)
        return config.model_copy(update={section: section_values})

    return _Change(settings, apply)


def _sharded(width: int, tp: int) -> _Change:
    """A change that shards state over this many groups of devices. The `tp` devices of a group
    share every layer.
    """
    axes = {"fsdp": width} if tp == 1 else {"fsdp": width, "tp": tp}
    strategy = "fsdp" if tp == 1 else "hybrid"
    text = ", ".join(f"{axis} = {size}" for axis, size in axes.items())
    settings = (f"distribution.strategy={strategy}", f"distribution.mesh={{{text}}}")

    def apply(config: TrainConfig) -> TrainConfig:
        workers = config.distribution.workers_per_device
        section_values = DistributionSection(strategy=strategy, mesh=axes, workers_per_device=workers)  # type: ignore[arg-type]
        return config.model_copy(update={"distribution": section_values})

    return _Change(settings, apply)
