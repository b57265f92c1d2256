"""Measures planning a training step, binding one device's program, and saving and loading a plan.

Plans have 36 to 10,000 layers with gradients and optimizer, on 1 to 512 devices. Compares with the
time to make as many dataclass objects as the plan of 1,000 layers has, and with PyTorch's modules
of the same widths on the meta device. Figures are medians of several runs, in wall time.

Run: python benchmarks/planning.py [--runs 5] [--seconds 100] [--layers 10000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise import optim
from tilewise.models import build_training_graph
from tilewise.models.decoder.model import decoder_layer
from tilewise.models.decoder.rope import rope_table
from tilewise.models.llama import LlamaConfig
from tilewise.nn import linear, rms_norm
from tilewise.session import Plan
from tilewise.session.assemble import native_program

LAYERS, BATCH, SEQ = 36, 1024, 128
WIDTHS = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1376}
MESHES: dict[str, tuple[dict[str, int], float, float]] = {
    "1 device": ({}, 0.4, 0.2),
    "16 devices": ({"dp": 4, "tp": 4}, 0.8, 0.4),
    "512 devices": ({"dp": 64, "tp": 8}, 2.0, 1.0),
}


def config_of(layers: int) -> LlamaConfig:
    """The model of all runs."""
    return LlamaConfig(**WIDTHS, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8)


def llama(layers: int) -> tw.ComputeGraph:
    """A training step of as many layers as a configuration may have."""
    graph = tw.ComputeGraph("planning")
    build_training_graph(graph, config_of(layers), BATCH, SEQ, dtype="f32")
    graph.optimize(optim.AdamW())
    return graph


def stack(layers: int) -> tw.ComputeGraph:
    """The same layers, any number of them, between an embedding's and a head's shapes of one small vocabulary."""
    decoder, graph = config_of(1).decoder, tw.ComputeGraph("planning")
    tokens, labels = (
        graph.input([BATCH, SEQ], "i32", name=name, labels=[tw.BATCH, None], storage="scalars")
        for name in ("tokens", "labels")
    )
    rows = np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1))
    positions = graph.constant(rows, name="positions", labels=[tw.BATCH, None], storage="scalars")
    table = graph.constant(rope_table(decoder.ropes[0], decoder.head_dim, SEQ, SEQ), name="rope_table")
    weight = graph.parameter([256, decoder.hidden_size], "f32", name="embed.weight")
    x = graph.embedding(tokens, weight)
    for i in range(layers):
        x = decoder_layer(
            graph, x, positions, table, path=f"layers.{i}", decoder=decoder, kind=decoder.layers[0]
        )
    logits = linear(graph, rms_norm(graph, x, "norm.weight", eps=1e-5), "head.weight", 256)
    graph.loss(graph.mean_cross_entropy(logits, labels)[0])
    graph.optimize(optim.AdamW())
    return graph


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_of(runs: int, work: Callable[[], Any]) -> float:
    """Median wall time of some calls, after one that is not counted."""
    work()
    return statistics.median(seconds_of(work) for _ in range(runs))


def show_time(what: str, seconds: float, must: float, goal: float) -> None:
    """Of wall time."""
    show(Figure(what, seconds * 1e3, "ms", less_is_better=True, must=must * 1e3, goal=goal * 1e3))


@dataclass(frozen=True)
class _Object:
    key: tuple[str, int]
    offset: int
    size: int
    kind: str


def seconds_to_make(count: int) -> float:
    """Time to make so many small frozen objects with a key each and to look them up."""
    return seconds_of(lambda: {(o := _Object(("tensor", i), i, i, "rows")).key: o for i in range(count)})


def seconds_of_torch(layers: int, runs: int) -> float | None:
    """Modules of the same widths and depth on PyTorch's meta device, and AdamW over them; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None

    def build() -> None:
        d, f = WIDTHS["hidden_size"], WIDTHS["intermediate_size"]
        sizes = [(d, d)] * 4 + [(d, f)] * 2 + [(f, d)]
        with torch.device("meta"):
            every = torch.nn.ModuleList(
                torch.nn.ModuleList(
                    [
                        *(torch.nn.Linear(a, b, bias=False) for a, b in sizes),
                        *(torch.nn.RMSNorm(d) for _ in "12"),
                    ]
                )
                for _ in range(layers)
            )
        torch.optim.AdamW(every.parameters())

    return median_of(runs, build)


def measure_meshes(runs: int) -> Plan:
    """36 layers on each mesh; returns the plan of the last."""
    plans: list[Plan] = []
    for name, (mesh, must, goal) in MESHES.items():
        graph = llama(LAYERS)

        def plan(graph: tw.ComputeGraph = graph, mesh: dict[str, int] = mesh) -> None:
            plans[:] = [graph.plan(mesh, batch_splits=64)]

        show_time(f"{LAYERS} layers, {name}", median_of(runs, plan), must, goal)
    return plans[0]


def measure_binding(plan: Plan) -> None:
    """Each device once, in a program that is made for it: the slowest of some devices counts."""
    devices = plan.mesh.num_devices
    native = native_program(plan.program, plan.symbol_bounds)
    picked = [1, devices // 2, devices - 1]
    show_time(
        "bind one device of 512", max(seconds_of(lambda d=d: native.bind(d)) for d in picked), 0.05, 0.01
    )  # type: ignore[misc]


def measure_traffic(plan: Plan, runs: int) -> None:
    """Counting the elements that each device reads from others in a step."""
    seconds = median_of(runs, lambda: plan.traffic("step"))
    show_time("count the traffic of 512 devices", seconds, 1.0, 0.5)


def measure_file(plan: Plan, runs: int) -> None:
    """Saving a plan and loading it: its graph and settings are read, it is made again, and digests are compared."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.plan"
        show_time("save the plan for 512 devices", median_of(runs, lambda: plan.save(path)), 1.0, 0.5)
        show_time("load it, which plans again", median_of(runs, lambda: Plan.load(path)), 2.0, 1.0)
        print(f"  {path.stat().st_size:,} bytes")
        llama(LAYERS).plan({}, batch_splits=64).save(path)
        show_time(
            f"load the plan of {LAYERS} layers, 1 device", median_of(runs, lambda: Plan.load(path)), 0.3, 0.15
        )


def measure_depth(layers: int, runs: int, ends_at: float) -> None:
    """1,000 layers, and the requested number; fewer when time is short."""
    graph, plans = stack(1000), []
    one = median_of(max(runs // 2, 1), lambda: plans.append(graph.plan({})))
    show_time("1,000 layers, 1 device", one, 2.0, 1.0)
    plan = plans[-1]
    count = len(plan.graph.tensors) + len(plan.program.classes[0].entries) + len(plan.placement(0).buffers)
    made = seconds_to_make(count)
    print(f"  bound: {count:,} small objects made in {made * 1e3:.0f} ms, {made / one:.1%} of that")
    plans.clear()
    time_left = ends_at - time.monotonic()
    fits = max(0, int(time_left / (one * 1.3))) * 1000
    if fits < layers:
        print(f"{layers:,} layers would take longer than the time that is left; {fits:,} are taken instead")
    layers = min(layers, fits)
    if layers > 1000:
        deep = stack(layers)
        seconds = seconds_of(lambda: deep.plan({}))
        growth = seconds / one / (layers / 1000)
        what = f"{layers:,} layers, 1 device, against linear"
        show(Figure(what, growth, "x", less_is_better=True, must=1.10, goal=1.05, note=f"{seconds:.1f} s"))


def main() -> None:
    """Print the machine and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=100, help="the deepest graph shrinks to fit")
    parser.add_argument("--layers", type=int, default=10_000)
    options = parser.parse_args()
    ends_at = time.monotonic() + options.seconds
    print(f"{machine('torch')}; one thread")
    plan = measure_meshes(options.runs)
    measure_binding(plan)
    measure_traffic(plan, options.runs)
    measure_file(plan, options.runs)
    del plan
    peer = seconds_of_torch(LAYERS, options.runs)
    if peer is not None:
        print(f"next to: PyTorch makes {LAYERS} layers and AdamW on its meta device in {peer * 1e3:.0f} ms")
    measure_depth(options.layers, options.runs, ends_at)


if __name__ == "__main__":
    main()
