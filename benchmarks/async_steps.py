"""Measures what asynchronous steps cost, and what copying the next batch's inputs meanwhile gains.

1. The demo's model: `step_async().wait()` compared with `step()`, in pairs that take turns: the ratio
   of medians, which must be at most 1.01. Next to it: the time of a call that does nothing, through
   the queue's thread and back.
2. A model with 64 MB of inputs per step, given as f64 in the order of columns, so that they must be
   converted: blocking steps, and asynchronous ones that are queued one batch early. The limit is a
   blocking step whose inputs were converted before; its copy into the devices' memory (32 MB) is
   left, because every step reads its inputs until its end.

The results of all ways must be equal. While a step runs, its workers and the caller share the
cores, so a gain needs a core that the workers leave free: compare `--threads`.

Run: python benchmarks/async_steps.py [--rounds 31] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from demo_step import BATCH, CONTEXT, MODEL, batch_of
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise import models, nn
from tilewise.models import llama
from tilewise.runtime.calls import CallHandle, CallQueue

ROWS, COLUMNS, HIDDEN = 4096, 2048, 512
STEPS = 4  # of a loop
LR = 3e-4
WAYS = ("converted before", "blocking", "asynchronous")
Batch = Mapping[str, np.ndarray]
Result = TypeVar("Result")


def demo_model(threads: int) -> tw.GraphInstance:
    """The demo's model, ready for its first step."""
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**MODEL), BATCH, CONTEXT, dtype="bf16")
    return ready(graph, threads)


def wide_model(threads: int) -> tw.GraphInstance:
    """Two products over large inputs."""
    graph = tw.ComputeGraph("wide")
    x = graph.input([ROWS, COLUMNS], "f32", name="x", labels=[tw.BATCH, None])
    hidden = graph.relu(nn.linear(graph, x, "hidden.weight", HIDDEN))
    graph.loss(graph.mean(nn.linear(graph, hidden, "last.weight", 64)))
    return ready(graph, threads)


def ready(graph: tw.ComputeGraph, threads: int) -> tw.GraphInstance:
    """A model of a graph with AdamW, on one device."""
    graph.optimize(tw.optim.AdamW())
    model = graph.instantiate(graph.plan({}, workers_per_device=threads))
    model.initialize(seed=0)
    return model


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds and result of a call."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def compare_steps(threads: int, rounds: int) -> None:
    """Pairs of a blocking step and an asynchronous one."""
    with demo_model(threads) as blocking, demo_model(threads) as queued:
        pairs = []
        for number in range(rounds + 2):
            tokens, labels = batch_of(number)
            batch = {"tokens": tokens, "labels": labels}
            calls = [
                lambda batch=batch: blocking.step(batch, LR),
                lambda batch=batch: queued.step_async(batch, LR).result(),
            ]
            results = {which: timed(calls[which]) for which in ((0, 1), (1, 0))[number % 2]}
            require_equal(results[0][1], results[1][1])
            pairs.append((results[0][0], results[1][0]))
    own, other = (statistics.median(column) for column in zip(*pairs[2:]))
    ratio = statistics.median(b / a for a, b in pairs[2:])
    note = f"{own * 1e3:.2f} ms and {other * 1e3:.2f} ms; median of the pairs' ratios {ratio:.4f}"
    what = f"step_async().wait() over step(), workers: {threads}"
    show(Figure(what, other / own, "x", less_is_better=True, must=1.01, note=note))


def require_equal(*results: object) -> None:
    """End with an error if the ways differ in a bit."""
    if len({str(result) for result in results}) > 1:
        raise SystemExit(f"results differ: {results}")


def measure_call() -> None:
    """A call that does nothing, from the caller to the queue's thread and back."""
    queue = CallQueue("benchmark")
    seconds = [timed(lambda: queue.start(CallHandle("nothing", int)).wait())[0] for _ in range(1000)]
    queue.close()
    show(Figure("a call that does nothing", statistics.median(seconds) * 1e6, "us", less_is_better=True))


def loop(model: tw.GraphInstance, way: str, batches: list[Batch]) -> tuple[float, list[float]]:
    """Seconds per step, and the losses, of a loop over batches."""
    if way != "asynchronous":
        seconds, losses = timed(lambda: [model.step(batch, LR).loss for batch in batches])
        return seconds / len(batches), losses
    running, losses = model.step_async(batches[0], LR), []
    started = time.perf_counter()
    for batch in [*batches[1:], batches[0]]:  # in each turn a step runs, and the next batch is copied
        following = model.step_async(batch, LR)
        losses.append(running.result().loss)
        running = following
    seconds = time.perf_counter() - started
    running.wait()
    return seconds / len(batches), losses


def compare_loops(threads: int, rounds: int) -> None:
    """Loops of the three ways, in turns."""
    generator = np.random.default_rng(0)
    columns = [np.asfortranarray(generator.standard_normal((ROWS, COLUMNS))) for _ in range(STEPS)]
    batches = {
        way: [{"x": x.astype(np.float32, order="C") if way == WAYS[0] else x} for x in columns]
        for way in WAYS
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        results = {}
        for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
            with wide_model(threads) as model:
                loop(model, "blocking", batches[WAYS[0]][:1])  # the first step allocates memory pages
                results[way] = loop(model, way, batches[way])
        require_equal(*(losses for _, losses in results.values()))
        for way in WAYS if turn else ():
            seconds[way].append(results[way][0])
    limit, blocking, queued = (statistics.median(seconds[way]) * 1e3 for way in WAYS)
    pairs = zip(seconds["asynchronous"], seconds["blocking"])
    note = f"median of the pairs' ratios to blocking {statistics.median(a / b for a, b in pairs):.3f}"
    what = f"step with 64 MB of inputs, workers: {threads}"
    show(
        Figure(what, queued, "ms", less_is_better=True, peers={"blocking": blocking}, limit=limit, note=note)
    )


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="workers of the device")
    options = parser.parse_args()
    print(f"{machine()}; {options.rounds} rounds")
    measure_call()
    for threads in options.threads:
        compare_steps(threads, options.rounds)
        compare_loops(threads, options.rounds // 2)


if __name__ == "__main__":
    main()
