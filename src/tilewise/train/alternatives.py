"""Changes of a configuration that change no bit of the result: of the mesh, workers, microbatches,
recomputation and tile sizes. The functions return changed configurations; they plan nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

from tilewise.core.limits import num_cores
from tilewise.strategy import microbatches_for
from tilewise.train.train_config import ABOUT_SHARDING, DistributionSection, TrainConfig

__all__ = [
    "as_toml",
    "describe_settings",
    "larger_and_smaller_tiles",
    "memory_ladder",
    "other_meshes",
    "with_more_microbatches",
]

_STRATEGIES = {"dp": "ddp", "fsdp": "fsdp", "tp": "tensor_parallel", "pp": "pipeline"}
_MICROBATCHES_PER_STAGE = 4  # of a pipeline that is tried
_COSTS = {"none": 0, "selective": 1, "full": 10}  # cost in time, relative to doubling the microbatches
_DEARER_THAN_FULL = 11  # for patterns of a user, whose cost is unknown
_MOST_TILE_ROWS = 4096


def other_meshes(config: TrainConfig) -> Iterator[TrainConfig]:
    """The configuration with its own mesh, and then with every mesh of one axis that uses the same
    number of cores. The number of cores is that of the machine, or workers times devices if the
    configuration sets workers.
    """
    distribution = config.distribution
    yield config
    num_devices = prod(distribution.mesh.values())
    cores = (
        num_cores()
        if distribution.workers_per_device is None
        else distribution.workers_per_device * num_devices
    )
    if num_devices > 1:
        yield _over(config, {}, cores)
    width = 2
    while width <= cores:
        for axis in _STRATEGIES:
            if distribution.mesh != {axis: width}:
                yield _over(config, {axis: width}, cores // width)
        width *= 2


def _over(config: TrainConfig, mesh: dict[str, int], workers: int) -> TrainConfig:
    """The configuration over another mesh, with the default schedule if it has stages."""
    distribution = config.distribution
    settings: dict[str, Any] = {}
    if "fsdp" in mesh and "fsdp" in distribution.mesh:
        settings = {name: getattr(distribution, name) for name in ABOUT_SHARDING}
    settings |= {
        "strategy": _STRATEGIES[next(iter(mesh))] if mesh else "single",
        "mesh": mesh,
        "workers_per_device": None if distribution.workers_per_device is None else workers,
    }
    config = config.model_copy(update={"distribution": DistributionSection(**settings)})
    if "pp" not in mesh:
        return config
    stages, splits = mesh["pp"], config.train.batch_splits
    least = max(config.train.accumulation, _MICROBATCHES_PER_STAGE * stages)
    number = microbatches_for(config.distribution.schedule, stages, splits, 1, least)
    return _with_train(config, accumulation=number)


def memory_ladder(config: TrainConfig) -> Iterator[TrainConfig]:
    """The configuration with changes of microbatches and recomputation that may need less memory.
    Changes that cost the least time come first.
    """
    train = config.train
    words = ["none", "selective", "full"]
    recomputed = [*words, *([] if train.recompute in words else [train.recompute])]
    doubled = [1 << n for n in range(train.batch_splits.bit_length())]
    rungs = [
        (_cost(recompute) + accumulation.bit_length(), accumulation, recompute)
        for recompute in recomputed
        for accumulation in sorted({*doubled, train.accumulation})
    ]
    for _, accumulation, recompute in sorted(rungs, key=lambda rung: rung[:2]):
        yield _with_train(config, accumulation=accumulation, recompute=recompute)


def _cost(recompute: str | tuple[str, ...]) -> int:
    return _COSTS.get(recompute, _DEARER_THAN_FULL) if isinstance(recompute, str) else _DEARER_THAN_FULL


def with_more_microbatches(config: TrainConfig) -> TrainConfig:
    """The configuration with twice as many microbatches, each half as large."""
    return _with_train(config, accumulation=2 * config.train.accumulation)


def larger_and_smaller_tiles(config: TrainConfig) -> Iterator[TrainConfig]:
    """The configuration with tiles of one sequence, two, four and so on, up to the size of a batch
    split.
    """
    sequences, rows = 1, config.data.context
    while (
        sequences <= config.train.batch // config.train.batch_splits and sequences * rows <= _MOST_TILE_ROWS
    ):
        yield _with_train(config, rows_per_tile=sequences * rows)
        sequences *= 2


def _with_train(config: TrainConfig, **settings: object) -> TrainConfig:
    return config.model_copy(update={"train": config.train.model_copy(update=settings)})


def describe_settings(config: TrainConfig) -> str:
    """The settings that this module may change, in a few words."""
    distribution, train = config.distribution, config.train
    mesh = ", ".join(f"{axis}={size}" for axis, size in distribution.mesh.items()) or "one device"
    recompute = train.recompute if isinstance(train.recompute, str) else " ".join(train.recompute)
    count = distribution.workers_per_device
    workers = "" if count is None else f", {count} worker{'s' if count > 1 else ''} per device"
    return (
        f"{mesh}{workers}, accumulation {train.accumulation}, recompute {recompute}, "
        f"{train.rows_per_tile} rows per tile"
    )


def as_toml(config: TrainConfig) -> str:
    """The same settings as keys of a configuration file."""
    distribution, train = config.distribution, config.train
    recompute = train.recompute if isinstance(train.recompute, str) else list(train.recompute)
    mesh = ", ".join(f"{axis} = {size}" for axis, size in distribution.mesh.items())
    lines = [
        "[train]",
        f"accumulation = {train.accumulation}",
        f"recompute = {json.dumps(recompute)}",
        f"rows_per_tile = {train.rows_per_tile}",
        "",
        "[distribution]",
        f"strategy = {json.dumps(distribution.strategy)}",
        f"mesh = {{ {mesh} }}" if mesh else "mesh = {}",
    ]
    if distribution.workers_per_device is not None:
        lines.append(f"workers_per_device = {distribution.workers_per_device}")
    return "\n".join(lines)
