"""Measures where a training step spends its time: a row per kernel, compared with its limit.

Kernel times are the fastest run of every task over some steps; idle time is that of the fastest
step. Limits are measured before and after on as many threads: multiply-adds on registers, and
copying memory (operands in a cache may exceed it). Bytes and operations follow from the
instructions' operands. Models are those of demo_step.py. `linear` includes the input gradient that
ends with the forward product; `linear_dw` is the weight gradient. The last line is the step time if
every matmul ran at its limit.

Run: python benchmarks/step_profile.py [--shape gpt2] [--on 2x1] [--axis fsdp] [--dtype f32 bf16] [--steps 4]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from demo_step import CONTEXT, SHAPES, batch_of, measure_peak
from figures import Figure, show
from machine import machine
from two_devices import copy_bandwidth

import tilewise as tw
from tilewise import models
from tilewise.ir.program import DeviceClass, Instruction, TensorEntry
from tilewise.kernels.table import kernel_spec
from tilewise.models import llama
from tilewise.observe import TaskSpan
from tilewise.session import Plan

DEFAULT = ("gpt2", "2x1", "dp")
ITEM_BYTES = {"f32": 4, "i32": 4, "bf16": 2, "f64": 8}
LEAST_SHARE = 0.002


@dataclass
class Row:
    """Totals of the tasks of one label in a step, over all devices."""

    seconds: float = 0.0
    tasks: int = 0
    flops: float = 0.0
    moved: float = 0.0


def instructions(of: DeviceClass) -> Iterator[tuple[Instruction, list[TensorEntry | None]]]:
    """Every instruction of a step, once per use, with the memory of its operands."""
    for call in of.calls["step"]:  # forward and backward passes alone have names of their own
        for instruction in of.templates[call.template].instructions:
            entries = [None if o.null else of.entries[call.binding[o.slot]] for o in instruction.operands]
            yield instruction, entries


def matmul_flops(kernel: str, entries: list[TensorEntry | None]) -> float:
    """Multiplications and additions of a matmul; 0 of any other kernel."""
    base, out = kernel.rpartition("_")[0], entries[0] if entries else None
    if out is None:
        return 0.0
    if base in ("matmul", "matmul_dx"):
        weights = [e for e in entries[3::2] if e is not None]
        return 2.0 * out.extent.constant * sum(w.extent.constant * w.cols for w in weights)
    if base == "matmul_dw" and entries[1] is not None:
        return 2.0 * entries[1].extent.constant * out.extent.constant * out.cols
    return 0.0


def bytes_moved(instruction: Instruction, entries: list[TensorEntry | None]) -> float:
    """Bytes that a kernel reads and writes at least; 0 where that is no limit, and of most lists of operands."""
    if not instruction.kernel or instruction.kernel.startswith("attention"):
        return 0.0
    operands = kernel_spec(instruction.kernel).operands
    roles = [o.role for o in operands]
    if instruction.kernel.startswith(
        "update"
    ):  # the copy; weight and states; gradient, hyper-parameters, clip
        roles = ["out", *["inout"] * (len(entries) - 4), "in", "in", "in"]
    elif any(o.is_list for o in operands):
        return 0.0
    times = {"in": 1, "out": 1, "inout": 2}
    sizes = (0 if e is None else e.extent.constant * e.cols * ITEM_BYTES[e.dtype] for e in entries)
    return float(sum(times[role] * size for role, size in zip(roles, sizes)))


def describe(plan: Plan) -> dict[str, Row]:
    """Work per label, over all devices."""
    rows: dict[str, Row] = defaultdict(Row)
    for device in plan.program.devices:
        for instruction, entries in instructions(plan.program.classes[device.class_id]):
            row = rows[instruction.label]
            row.flops += matmul_flops(instruction.kernel, entries)
            row.moved += bytes_moved(instruction, entries)
    return rows


@dataclass
class Profile:
    """Rows of a step, the seconds of its fastest run, and that run's idle time of workers: without
    a ready task, and otherwise.
    """

    rows: dict[str, Row]
    seconds: float
    waiting: float
    between: float


def profile(shape: str, dtype: str, axis: str, devices: int, workers: int, steps: int) -> Profile:
    """The fastest run of every task in some steps, and of a step."""
    config, batch = SHAPES[shape].model, SHAPES[shape].batch
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**config), batch, CONTEXT, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    mesh = {axis: devices} if devices > 1 else {}
    plan = graph.plan(mesh, accumulation=1, workers_per_device=workers)
    model = graph.instantiate(plan)
    model.initialize(seed=0)
    model.trace(True)
    best: tuple[float, Sequence[TaskSpan]] = (float("inf"), ())
    fastest: dict[tuple[int, str, int], float] = {}
    for number in range(steps + 1):  # the first wakes threads and touches memory
        tokens, labels = batch_of(number, config["vocab_size"], batch)
        started = time.perf_counter()
        model.step({"tokens": tokens, "labels": labels}, lr=3e-4)
        seconds = time.perf_counter() - started
        if number == 0:
            continue
        tasks, seen = model.timeline().tasks, defaultdict[tuple[int, str], int](int)
        for task in sorted(tasks, key=lambda t: t.submit_ns):
            instruction = task.device, task.kernel
            key = *instruction, seen[instruction]
            seen[instruction] += 1
            fastest[key] = min(fastest.get(key, float("inf")), (task.end_ns - task.start_ns) / 1e9)
        if seconds < best[0]:
            best = seconds, tasks
    rows = describe(plan)
    for (_, label, _), seconds in fastest.items():
        rows[label].seconds += seconds
        rows[label].tasks += 1
    return Profile(rows, best[0], *idleness(best[1], best[0] * devices * workers))


def idleness(tasks: Sequence[TaskSpan], whole: float) -> tuple[float, float]:
    """Shares of the workers' time: until the next task of a worker was ready, and the rest without one."""
    waiting = busy = 0.0
    by_worker = sorted(tasks, key=lambda t: (t.device, t.worker, t.start_ns))
    for _, group in groupby(by_worker, key=lambda t: (t.device, t.worker)):
        own = list(group)
        busy += sum(t.end_ns - t.start_ns for t in own) / 1e9
        waiting += sum(max(0, min(b.ready_ns, b.start_ns) - a.end_ns) for a, b in pairwise(own)) / 1e9
    return waiting / whole, 1 - (busy + waiting) / whole


def show_profile(shape: str, mesh: str, axis: str, dtype: str, steps: int) -> None:
    """Limits, rows by their share, and their totals."""
    devices, workers = (int(n) for n in mesh.split("x"))
    threads = devices * workers
    peak = measure_peak(f"peak_{dtype}", threads)
    copied = 2 * threads * copy_bandwidth()
    result = profile(shape, dtype, axis, devices, workers, steps)
    peak = max(peak, measure_peak(f"peak_{dtype}", threads))
    copied = max(copied, 2 * threads * copy_bandwidth())
    rows, busy = result.rows, sum(row.seconds for row in result.rows.values())
    by = f" by {axis}" if devices > 1 else ""
    title = f"{dtype}" if (shape, mesh, axis) == DEFAULT else f"{shape}, {mesh}{by}, {dtype}"
    print(
        f"\n{shape}, {devices} device(s) x {workers} worker(s){by}, {dtype}: step {result.seconds:.3f} s, of "
        f"which workers wait for tasks {result.waiting:.1%} "
        f"and are between, before or after them {result.between:.1%}; "
        f"the fastest of each task {busy / threads:.3f} s a worker"
    )
    print(f"limits: {peak / 1e9:.0f} GFLOP/s and {copied / 1e9:.0f} GB/s on {threads} threads")
    print(f"{'share':>7} {'ms':>8} {'tasks':>6} {'of limit':>9}  kernel")
    for label, row in sorted(rows.items(), key=lambda item: -item[1].seconds):
        if row.seconds < LEAST_SHARE * busy:
            continue
        reached = row.flops * threads / peak if row.flops else row.moved * threads / copied
        of_limit = f"{reached / row.seconds:.0%} {'flops' if row.flops else 'bytes'}" if reached else "-"
        print(f"{row.seconds / busy:7.1%} {row.seconds * 1e3:8.1f} {row.tasks:6} {of_limit:>9}  {label}")
    flops = sum(row.flops for row in rows.values())
    matmuls = sum(row.seconds for row in rows.values() if row.flops)
    ideal = flops / peak
    note = (
        f"{matmuls / busy:.1%} of the kernels' time; with them at it the step would take "
        f"{(busy - matmuls) / threads + ideal:.3f} s, with nothing else {ideal:.3f} s"
    )
    show(
        Figure(
            f"{title}: matmuls, of their limit", 100 * ideal * threads / matmuls, "%", limit=100, note=note
        )
    )
    show(Figure(f"{title}: a step", result.seconds, "s", less_is_better=True, limit=ideal))


def main() -> None:
    """Parse arguments and print a profile per dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[DEFAULT[0]])
    parser.add_argument(
        "--on", nargs="+", choices=("2x1", "1x2"), default=[DEFAULT[1]], help="devices x workers"
    )
    parser.add_argument("--axis", choices=("dp", "tp", "fsdp"), default=DEFAULT[2], help="of several devices")
    parser.add_argument("--dtype", nargs="+", choices=("f32", "bf16"), default=["f32", "bf16"])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print(machine("numpy"))
    for shape in options.shape:
        for mesh in options.on:
            for dtype in options.dtype:
                show_profile(shape, mesh, options.axis, dtype, options.steps)


if __name__ == "__main__":
    main()
