"""Measures execution policies: where affinity and explicit placement win, and what the default loses.

    affinity  a chain of 64 products of one row with one weight of 1.6 MB, which fits the private caches of two
              cores and not that of one. Each worker finds its half of the columns there again. The limit is
              twice the rate at which one core reads a weight that fits its own cache, with the same kernel.
    explicit  two independent branches: 64 products that could run in any order, then a chain of 64 products. By
              default tasks are submitted in the order of the graph, and few in advance, so the chain begins last
              and runs alone. Pinned to a worker each, both begin at once. The limit is one branch on one worker.
    default   the default next to affinity, and next to all tasks of an instruction pinned in equal parts, for a
              training step of a Llama block and for decoding. The default must be within 2% of the best.

Modes take turns in every round. A mode's time is the 10th percentile of its rounds, because other
programs of a shared machine only ever add time; the median is printed too.

Run: python benchmarks/policies.py [--only affinity explicit default] [--rounds 1500] [--minutes 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from figures import Figure, show
from machine import run_parts

if TYPE_CHECKING:
    import tilewise as tw

STEPS, WIDE, NARROW = 64, 640, 448  # 1.6 MB and 0.8 MB in fp32
ROWS, COLUMNS = 16, 224  # of a branch; a product with so few columns is one task
DEFAULT = 0.98
BLOCK = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}

Modes = Mapping[str, Callable[[], object]]


class Times(NamedTuple):
    """Seconds of a mode: its 10th percentile, and its median."""

    quiet: float
    median: float


def time_of(modes: Modes, rounds: int, end: float) -> dict[str, Times]:
    """The times of each mode. Modes take turns; the first ten rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(rounds + 10):
        for name, run in modes.items():
            began = time.perf_counter()
            run()
            if number >= 10:
                times[name].append(time.perf_counter() - began)
        if number > 30 and time.monotonic() > end:
            break
    return {name: Times(float(np.percentile(of, 10)), statistics.median(of)) for name, of in times.items()}


def policies() -> dict[str, tw.ExecutionPolicy]:
    """The policies that fit any graph."""
    from tilewise import ExecutionPolicy

    return {
        "owner_computes": ExecutionPolicy(),
        "affinity": ExecutionPolicy("affinity"),
    }


def chain(width: int) -> tw.ComputeGraph:
    """Products of one row, each with the result of the one before, all with one weight."""
    import tilewise as tw

    graph = tw.ComputeGraph("chain")
    y = graph.input([1, width], name="x")
    weight = graph.parameter([width, width], name="w")
    for _ in range(STEPS):
        y = graph.matmul(y, weight, trans_b=True)
    graph.output(y, "y")
    return graph


def branches(*names: str) -> tw.ComputeGraph:
    """A `wide` branch of independent products, and a `deep` one whose products depend on each other."""
    import tilewise as tw

    graph = tw.ComputeGraph("branches")
    x = graph.input([ROWS, COLUMNS], name="x")
    for name in names:
        weight, y = graph.parameter([COLUMNS, COLUMNS], name=name), x
        for step in range(STEPS):
            y = graph.matmul(y if name == "deep" else graph.scale(x, 1.0 + step), weight, trans_b=True)
            if name == "wide" or step + 1 == STEPS:
                graph.output(y, f"{name}_{step}")
    return graph


def instances(
    graph: tw.ComputeGraph, modes: Mapping[str, tw.ExecutionPolicy], workers: int = 2
) -> dict[str, tw.GraphInstance]:
    """An instance per policy, with equal weights."""
    made = {}
    for name, policy in modes.items():
        made[name] = graph.instantiate(graph.plan({"dp": 1}, workers_per_device=workers, policy=policy))
        made[name].initialize(seed=0)
    return made


def forward_of(instance: tw.GraphInstance) -> Callable[[], object]:
    """One forward pass with ones."""
    graph = instance.plan.graph
    batch = {t.spec.name: np.ones(t.spec.shape, np.float32) for t in graph.of_kind("input")}
    return lambda: instance.forward(**batch)


def one_core(graph: tw.ComputeGraph) -> tw.GraphInstance:
    """A graph on one worker."""
    from tilewise import ExecutionPolicy

    return instances(graph, {"": ExecutionPolicy()}, workers=1)[""]


def measure_affinity(options: argparse.Namespace, end: float) -> None:
    """A weight that fits two private caches."""
    modes = instances(chain(WIDE), policies())
    modes["alone"] = one_core(chain(NARROW))
    times = time_of({name: forward_of(m) for name, m in modes.items()}, options.rounds, end)
    limit = times["alone"].quiet * (WIDE / NARROW) ** 2 / 2
    own, other = times["affinity"], times["owner_computes"]
    show(
        Figure(
            "a weight in two private caches: affinity to owner_computes",
            other.quiet / own.quiet,
            "x",
            must=1.0,
            limit=other.quiet / limit,
            note=f"{own.quiet * 1e6:.0f} and {other.quiet * 1e6:.0f} us (medians {own.median * 1e6:.0f}, "
            f"{other.median * 1e6:.0f}); both cores from their caches: {limit * 1e6:.0f} us",
        )
    )
    for model in modes.values():
        model.close()


def measure_explicit(options: argparse.Namespace, end: float) -> None:
    """Two branches that do not need each other."""
    from tilewise import ExecutionPolicy

    pins = ExecutionPolicy("explicit", workers={"linear:wide": 0, "scale": 0, "linear:deep": 1})
    modes = instances(branches("wide", "deep"), {**policies(), "explicit": pins})
    modes["alone"] = one_core(branches("deep"))
    times = time_of({name: forward_of(m) for name, m in modes.items()}, options.rounds, end)
    own, limit = times["explicit"], times["alone"].quiet
    for name in policies():
        other = times[name]
        show(
            Figure(
                f"two branches: explicit to {name}",
                other.quiet / own.quiet,
                "x",
                must=1.0,
                limit=other.quiet / limit,
                note=f"{own.quiet * 1e6:.0f} and {other.quiet * 1e6:.0f} us (medians {own.median * 1e6:.0f}, "
                f"{other.median * 1e6:.0f}); the chain alone: {limit * 1e6:.0f} us",
            )
        )
    for model in modes.values():
        model.close()


def measure_default(options: argparse.Namespace, end: float) -> None:
    """The default next to other policies, on shapes of other benchmarks."""
    from tilewise import ExecutionPolicy

    every = {**policies(), "pinned in parts": ExecutionPolicy("explicit", workers={"*": (0, 1)})}
    cases = {"training step of two Llama blocks": training, "forward pass of one row": decoding}
    for number, (name, make) in enumerate(cases.items()):
        modes, run = make(every)
        left = (end - time.monotonic()) / (len(cases) - number)
        times = time_of(
            {mode: (lambda model=model, run=run: run(model)) for mode, model in modes.items()},
            options.rounds,
            time.monotonic() + left,
        )
        default = times["owner_computes"]
        best = min(times, key=lambda mode: times[mode].quiet)
        show(
            Figure(
                f"{name}: the default to the best policy",
                times[best].quiet / default.quiet,
                "x",
                must=DEFAULT,
                limit=1.0,
                peers={mode: times[mode].quiet / default.quiet for mode in times if mode != "owner_computes"},
                note=f"{default.quiet * 1e3:.2f} ms (median {default.median * 1e3:.2f}); best: {best}; the limit is 1 "
                "because the default is among the policies",
            )
        )
        for model in modes.values():
            model.close()


Case = tuple[dict[str, "tw.GraphInstance"], Callable[["tw.GraphInstance"], object]]


def training(modes: Mapping[str, tw.ExecutionPolicy]) -> Case:
    """A step of 256 tokens."""
    import tilewise as tw
    from tilewise import models

    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, models.config_from_dict(BLOCK), 4, 64, "f32")
    graph.optimize(tw.optim.AdamW())
    tokens = np.random.default_rng(0).integers(0, 512, (4, 64))
    batch = {"tokens": tokens, "labels": tokens}
    return instances(graph, modes), lambda model: model.step(batch, lr=1e-3)


def decoding(modes: Mapping[str, tw.ExecutionPolicy]) -> Case:
    """Products of one row with weights that no cache holds, as in decoding."""
    import tilewise as tw
    from tilewise.nn import linear

    graph = tw.ComputeGraph("rows")
    y = graph.input([1, 1024], name="x")
    for layer in range(6):
        y = linear(graph, graph.silu(linear(graph, y, f"{layer}.up", 3072)), f"{layer}.down", 1024)
    graph.output(y, "y")
    x = np.ones((1, 1024), np.float32)
    return instances(graph, modes), lambda model: model.forward(x=x)


PARTS = {"affinity": measure_affinity, "explicit": measure_explicit, "default": measure_default}
SHARES = {"affinity": 1.0, "explicit": 1.0, "default": 2.0}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=3.0)
    run_parts(PARTS, SHARES, parser.parse_args())


if __name__ == "__main__":
    main()
