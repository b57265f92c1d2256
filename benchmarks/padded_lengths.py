"""Measures a training step in one plan for all lengths, compared with a plan for each length.

Uses the demo's model with a symbolic length and with a fixed one. Steps take turns; medians and
paired ratios are compared, and the losses must have the same bits.

Run: python benchmarks/padded_lengths.py [--rounds 15] [--dtypes bf16 f32]
"""

from __future__ import annotations

import argparse
import statistics
import time

from demo_step import BATCH, CONTEXT, MODEL, batch_of
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise import models
from tilewise.models import llama

LENGTHS = (CONTEXT, CONTEXT // 2, CONTEXT // 4, CONTEXT // 8)


def make_model(length: int | tw.Dim, dtype: str) -> tw.GraphInstance:
    """The demo's model, ready for its first step."""
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**MODEL), BATCH, length, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    model = graph.instantiate()
    model.initialize(seed=0)
    return model


def step_of(model: tw.GraphInstance, number: int, length: int) -> tuple[float, float]:
    """Seconds and loss of one step of that length."""
    tokens, labels = batch_of(number)
    started = time.perf_counter()
    result = model.step({"tokens": tokens[:, :length], "labels": labels[:, :length]}, lr=3e-4)
    return time.perf_counter() - started, result.loss


def compare(length: int, dtype: str, rounds: int) -> list[tuple[float, float]]:
    """Seconds of all steps of one length, in a plan for any and in one for it alone; they must agree to the bit."""
    seconds = []
    with make_model(tw.Dim("seq", 1, CONTEXT), dtype) as any_length, make_model(length, dtype) as exact:
        for number in range(rounds + 2):
            turns = [(0, any_length), (1, exact)]
            results = {
                which: step_of(model, number, length) for which, model in turns[:: 1 if number % 2 else -1]
            }
            if results[0][1] != results[1][1]:
                raise SystemExit(f"step {number}: the losses differ: {results[0][1]} and {results[1][1]}")
            seconds.append((results[0][0], results[1][0]))
    return seconds[2:]


def main() -> None:
    """Print every comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f32"])
    options = parser.parse_args()
    print(f"{machine()}; {options.rounds} pairs of steps")
    for dtype in options.dtypes:
        for length in LENGTHS:
            pairs = compare(length, dtype, options.rounds)
            mine, theirs = (statistics.median(column) * 1e3 for column in zip(*pairs))
            ratio = statistics.median(a / b for a, b in pairs)
            what = f"{dtype}, {BATCH} x {length} tokens: any length against the exact one"
            note = f"{mine:.1f} ms, {theirs:.1f} ms; ratio of pairs"
            show(Figure(what, ratio, "x", less_is_better=True, must=1.05, note=note))


if __name__ == "__main__":
    main()
