"""`tilewise inspect train.toml`: estimates what a training run needs and how long a step takes,
before anything runs.

The plan gives the memory, and its instructions give FLOPs and bytes. The time follows from peak
speeds, which are measured or given. Only the configuration is read, no data and no weights.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.core.limits import available_memory, num_cores
from tilewise.core.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.plan.costs import DeviceCosts
    from tilewise.session import Plan
    from tilewise.train import TrainConfig

__all__ = ["DeviceProperties", "describe_training"]

_PARTS = {  # categories of `Plan.estimate_memory_usage`, in words
    "weights": ("parameters", "gathered"),
    "gradients": ("gradients", "carries"),
    "optimizer state": ("optimizer",),
    "activations": ("activations", "temporaries", "inputs", "outputs"),
    "checkpoint copy": ("checkpoints",),
    "communication and workers": ("rings", "signals", "scratch", "engine", "state"),
}
_MATRIX_KERNELS = ("matmul", "matmul_dx", "matmul_dw", "gemm", "attention", "attention_backward")
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device from the command line. A property of None is measured on this
    machine.

    Attributes:
        device_memory: bytes.
        peak_tflops: 10^12 operations per second.
        bandwidth_gbps: 10^9 bytes per second from memory.
    """

    device_memory: int | None = None
    peak_tflops: float | None = None
    bandwidth_gbps: float | None = None

    @property
    def flops(self) -> float | None:
        """Operations per second."""
        return None if self.peak_tflops is None else self.peak_tflops * 1e12

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second from memory."""
        return None if self.bandwidth_gbps is None else self.bandwidth_gbps * 1e9


@dataclass(frozen=True)
class _Peaks:
    """The peak speeds of a device.

    Attributes:
        flops: operations per second of matrix products, in the run's dtype.
        other_flops: operations per second of all other kernels, which compute in fp32.
        bandwidth: bytes per second from memory.
        origin: where the figures come from, in words.
    """

    flops: float
    other_flops: float
    bandwidth: float
    origin: str


@dataclass(frozen=True)
class _StepTime:
    """Seconds of a step, divided by what limits the kernels (computation, memory, communication), and
    the share of a step in which a stage of a pipeline waits for others.
    """

    compute: float
    memory: float
    communication: float
    idle_share: float

    @property
    def total(self) -> float:
        return (self.compute + self.memory + self.communication) / (1 - self.idle_share)


def describe_training(
    source: Path, device: DeviceProperties, console: Console, settings: Sequence[str] = ()
) -> Iterator[str]:
    """Describe a training configuration, line by line.

    Args:
        source: the configuration's file.
        device: memory and peak speeds of each device. Without a memory, the need of all
            devices together is compared with this machine's memory. Measured peaks are divided
            among the devices.
        console: shows what is being tried, if it is a terminal.
        settings: overrides of the file, as SECTION.KEY=VALUE.

    Raises:
        ConfigError: the file is not a valid configuration. The message names the key.
        LayoutError, PlanError: the strategy is not possible for this model.
    """
    from tilewise import models
    from tilewise.train import load_config, make_model_config, make_plan

    config = load_config(source, settings)
    _, plan = make_plan(config, must_fit=False)
    model = make_model_config(config)
    axes = ",".join(f"{axis}={size}" for axis, size in config.distribution.mesh.items()) or "one device"
    yield (
        f"parameters: {models.num_parameters(model):,} ({model.model_type}), trained in {config.train.dtype} on "
        f"{axes}"
    )
    yield from _memory(config, plan, device.device_memory, console)
    yield from _work(config, plan, _peaks(config, plan, device))


def _memory(config: TrainConfig, plan: Plan, device_memory: int | None, console: Console) -> Iterator[str]:
    usage = plan.estimate_memory_usage()
    largest = max(usage, key=lambda device: device["total"])
    need = largest["total"] if device_memory is not None else sum(device["total"] for device in usage)
    limit = available_memory() if device_memory is None else device_memory
    fits = need <= limit
    verdict = "fits" if fits else f"does not fit, by {format_bytes(need - limit)}"
    if device_memory is None:
        against = (
            f"{format_bytes(need)} in all, of {format_bytes(limit)} available on this machine: {verdict}"
        )
    else:
        against = f"of {format_bytes(limit)}: {verdict}"
    yield f"memory per device: {format_bytes(largest['total'])}, {against}"
    parts = {name: sum(largest[category] for category in of) for name, of in _PARTS.items()}
    yield "  " + ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    if largest["offloaded"]:
        yield f"  offloaded to a file of each device: {format_bytes(largest['offloaded'])}"
    if not fits:
        yield from _savings(config, limit, is_per_device=device_memory is not None, console=console)


def _savings(config: TrainConfig, limit: int, *, is_per_device: bool, console: Console) -> Iterator[str]:
    """Changes that would make a configuration fit in memory."""
    from tilewise.train import find_savings, need_of_all, need_per_device

    with console.status("planning with other settings") as status:
        savings = find_savings(
            config,
            need_per_device if is_per_device else need_of_all,
            limit,
            more_devices=is_per_device,
            report=lambda text: status.update(f"planning with {text}"),
        )
    fits = any(saving.fits for saving in savings)
    yield (
        "settings that make it fit, for `tilewise train`:"
        if fits
        else "settings that need less memory, but do not fit:"
    )
    for saving in sorted(savings, key=lambda saving: not saving.fits):
        settings = " ".join(f"--set {shlex.quote(setting)}" for setting in saving.settings)
        yield f"  {format_bytes(saving.need_bytes):>11} {'fits        ' if saving.fits else 'does not fit'}  {settings}"
    if not fits:
        yield "  use a smaller model, batch or context, or more devices"


def _peaks(config: TrainConfig, plan: Plan, device: DeviceProperties) -> _Peaks | None:
    """The given peaks, or each device's share of this machine's peaks. None if peaks are not given
    and cannot be measured.
    """
    from tilewise.machine import measure_bandwidth, measure_flops

    devices, workers = plan.mesh.num_devices, plan.settings.workers_per_device
    share = min(workers / num_cores(), 1 / devices)
    flops = device.flops or share * measure_flops(config.train.dtype)
    other = device.flops or share * measure_flops("f32")
    try:
        bandwidth = device.bandwidth or measure_bandwidth() / devices
    except MemoryError:
        return None
    given_peaks = [device.flops, device.bandwidth]
    origin = "given" if all(given_peaks) else "partly measured here" if any(given_peaks) else "measured here"
    return _Peaks(flops, other, bandwidth, origin)


def _work(config: TrainConfig, plan: Plan, peaks: _Peaks | None) -> Iterator[str]:
    costs = plan.costs()
    slowest = max(costs, key=lambda device: costs[device].flops)
    cost = costs[slowest]
    line = f"per device and step: {_count(cost.flops)}FLOP; {format_bytes(cost.num_bytes)} read and written in memory"
    if cost.peer_bytes:
        line += f", {format_bytes(cost.peer_bytes)} of it read from other devices"
    yield line
    read, written = plan.file_traffic()[slowest]
    if read or written:
        yield f"  files: {format_bytes(read)} read, {format_bytes(written)} written; their time is not estimated"
    if peaks is None:
        yield "time per step: not estimated, because memory is too small to measure its speed; give --bandwidth-gbps"
        return
    time = _step_time(cost, peaks, plan.idle_shares()[plan.layout.stage_of(slowest)])
    tokens = config.num_sequences * config.data.context
    parts = {
        "compute": time.compute,
        "memory": time.memory,
        "communication": time.communication,
    }
    bound = max(parts, key=lambda name: parts[name])
    if time.idle_share:
        parts["waiting for other stages"] = time.total * time.idle_share
    yield (
        f"time per step: about {_seconds(time.total)}, {tokens / time.total:,.0f} tokens/s, at "
        f"{_count(peaks.flops)}FLOP/s and {peaks.bandwidth / 1e9:.1f} GB/s per device ({peaks.origin})"
    )
    yield f"  {bound} bound: " + ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items())


def _step_time(cost: DeviceCosts, peaks: _Peaks, idle_share: float) -> _StepTime:
    """The estimated time of a step. Each kernel takes as long as its computation or its memory
    traffic, whichever is longer. The time of reads from other devices is added, at the speed of
    memory.
    """
    compute = memory = 0.0
    for kernel, kernel_cost in cost.kernels.items():
        is_matrix = kernel.rpartition("_")[0] in _MATRIX_KERNELS
        computing = kernel_cost.flops / (peaks.flops if is_matrix else peaks.other_flops)
        moving = max(0, kernel_cost.num_bytes - kernel_cost.peer_bytes) / peaks.bandwidth
        if computing >= moving:
            compute += computing
        else:
            memory += moving
    return _StepTime(compute, memory, cost.peer_bytes / peaks.bandwidth, idle_share)


def _count(value: float) -> str:
    """A number with three digits and a decimal prefix: `12.3 T`."""
    factor, prefix = next((pair for pair in _PREFIXES if value >= pair[0]), (1.0, ""))
    return f"{value / factor:.3g} {prefix}"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.1f} us"
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
