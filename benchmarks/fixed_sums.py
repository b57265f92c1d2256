"""Measures what fixed summation orders (k splits and batch splits) cost a training step.

Compares the same kernels with 8 k splits and the usual batch splits, and with one of each. Models
are GPT-2 small's shape (4 x 256 tokens) and the demo's (8 x 256), on one device with a worker per
core. Both sides take turns in one process; the ratio is the median over the rounds.

Run: python benchmarks/fixed_sums.py [--shapes demo gpt2] [--dtypes f32 bf16] [--rounds 12]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from demo_step import CONTEXT, SHAPES, batch_of
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise import models
from tilewise.models import llama
from tilewise.session import GraphInstance

MUST, GOAL = 1.03, 1.01


def instance(name: str, dtype: str, k_splits: int, batch_splits: int | None) -> GraphInstance:
    """A model, and how its sums are cut."""
    shape = SHAPES[name]
    graph = tw.ComputeGraph(name, k_splits=k_splits)
    config = llama.LlamaConfig(**shape.model)
    models.build_training_graph(graph, config, shape.batch, CONTEXT, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    model = graph.instantiate(graph.plan({}, batch_splits=batch_splits))
    model.initialize(seed=0)
    return model


def seconds_of(step: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(name: str, dtype: str, rounds: int) -> None:
    """One figure."""
    shape = SHAPES[name]
    with instance(name, dtype, 8, None) as cut, instance(name, dtype, 1, 1) as whole:
        pairs = []
        for number in range(rounds + 1):
            tokens, labels = batch_of(number, shape.model["vocab_size"], shape.batch)
            batch = {"tokens": tokens, "labels": labels}
            sides = [cut, whole] if number % 2 else [whole, cut]
            taken = {id(side): seconds_of(partial(side.step, batch, 3e-4)) for side in sides}
            pairs.append((taken[id(cut)], taken[id(whole)]))
    fixed, free = (statistics.median(column) for column in zip(*pairs[1:]))
    ratio = statistics.median(one / other for one, other in pairs[1:])
    what = f"{name}, {dtype}: a step with fixed sums, by one without"
    note = f"{fixed * 1e3:.0f} and {free * 1e3:.0f} ms"
    show(Figure(what, ratio, "x", less_is_better=True, must=MUST, goal=GOAL, note=note))


def main() -> None:
    """A line per shape and element type."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--dtypes", nargs="+", choices=("f32", "bf16"), default=["f32", "bf16"])
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    print(machine("numpy"))
    for name in options.shapes:
        for dtype in options.dtypes:
            measure(name, dtype, options.rounds)


if __name__ == "__main__":
    main()
