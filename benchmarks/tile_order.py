"""Measures two orders in which a device's workers take ready tasks of a tile program.

"From rings": only collectives have a priority, and other tasks run on the worker that made them
ready. "In order": all ready tasks are in one queue by priority and then by order of submission.
Steps of both take turns in one process; paired ratios are compared, and the losses must have the
same bits.

Run: python benchmarks/tile_order.py [--steps 30] [--dtypes bf16 f32]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from demo_step import BATCH, CONTEXT, MODEL, batch_of
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise import models
from tilewise.ir.program import LoweredTemplate
from tilewise.models import llama
from tilewise.session import Plan

MESHES = {"one device, two workers": ({}, 2), "dp=2": ({"dp": 2}, 1), "tp=2": ({"tp": 2}, 1)}


def in_order(plan: Plan) -> Plan:
    """The plan with a priority for every task, one more than it has."""

    def raised(template: LoweredTemplate) -> LoweredTemplate:
        listed = (replace(i, priority=i.priority + 1) for i in template.instructions)
        return replace(template, instructions=tuple(listed))

    classes = (
        replace(of, templates=tuple(raised(template) for template in of.templates))
        for of in plan.program.classes
    )
    return replace(plan, program=replace(plan.program, classes=tuple(classes)))


def make_model(axes: dict[str, int], workers: int, dtype: str, *, rings: bool) -> tw.GraphInstance:
    """The demo's model, ready for its first step."""
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**MODEL), BATCH, CONTEXT, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    plan = graph.plan(axes, workers_per_device=workers)
    model = graph.instantiate(plan if rings else in_order(plan))
    model.initialize(seed=0)
    return model


def step_of(model: tw.GraphInstance, number: int) -> tuple[float, float]:
    """Seconds and loss of one step."""
    tokens, labels = batch_of(number)
    started = time.perf_counter()
    loss = float(model.step({"tokens": tokens, "labels": labels}, lr=3e-4).loss)
    return time.perf_counter() - started, loss


def compare(
    axes: dict[str, int], workers: int, dtype: str, num_steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of all steps in order and from rings; they must agree to the bit."""
    ordered = make_model(axes, workers, dtype, rings=False)
    ringed = make_model(axes, workers, dtype, rings=True)
    seconds: tuple[list[float], list[float]] = ([], [])
    with ordered, ringed:
        for number in range(num_steps + 2):
            turns = [(0, ordered), (1, ringed)]
            results = {which: step_of(model, number) for which, model in turns[:: 1 if number % 2 else -1]}
            if results[0][1] != results[1][1]:
                raise SystemExit(f"step {number}: the losses differ: {results[0][1]} and {results[1][1]}")
            if number >= 2:
                seconds[0].append(results[0][0])
                seconds[1].append(results[1][0])
    return seconds


def main() -> None:
    """Print one line per mesh and dtype."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f32"])
    options = parser.parse_args()
    print(f"{machine()}; {options.steps} pairs of steps, two threads")
    for dtype in options.dtypes:
        for name, (axes, workers) in MESHES.items():
            ordered, ringed = compare(axes, workers, dtype, options.steps)
            ratios = [b / a for a, b in zip(ordered, ringed, strict=True)]
            note = (
                f"{statistics.median(ordered) * 1e3:.1f} ms in order, {statistics.median(ringed) * 1e3:.1f} ms; "
                f"ratio of pairs; of the quickest {min(ringed) / min(ordered):.3f}"
            )
            what = f"{dtype}, {name}: from rings against in order"
            show(Figure(what, statistics.median(ratios), "x", less_is_better=True, note=note))


if __name__ == "__main__":
    main()
