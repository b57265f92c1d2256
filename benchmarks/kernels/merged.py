"""Claim: products that share an operand (q, k and v; gate and up) would be no faster as one.

Each pair is the same multiplications on one core: a product per weight, or one of all weights together, which packs the
shared rows once. The ratio is the time apart over the time of one, the least of several rounds that take turns; above 1
merging would gain (docs/decisions.md has why it is left). Shares are of the ceiling that matmul.py measures.

    python benchmarks/kernels/merged.py [--seconds 0.1] [--rounds 6]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, show
from machine import machine
from matmul import NUMPY, aligned, best_seconds, ceiling, even_ranges

from tilewise.kernels import pack_weight
from tilewise.kernels.isa import isa_in_use, run

# m, k, columns of each weight
SHARED = {
    "gpt2 q k v": (256, 768, (768, 768, 768)),
    "gpt2 gate up": (256, 768, (2048, 2048)),
    "demo q k v": (512, 256, (256, 128, 128)),
    "demo gate up": (512, 256, (768, 768)),
}


def product(dt: str, m: int, k: int, n: int) -> Callable[[int], object]:
    """A call that multiplies rows by a packed weight some times."""
    gen = np.random.default_rng(0)
    x, y = (aligned(gen.standard_normal((m, cols)).astype(NUMPY[dt])) for cols in (k, n))
    w = (aligned(pack_weight(gen.standard_normal((n, k)), dt)), n, k)
    numbers = [int(dt == "f32"), 1, *even_ranges(k, 1)]
    return lambda count: run(f"matmul_{dt}", [y, None, x, w], numbers, repeat=count)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=0.1, help="time per figure and round")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    print(f"{machine()}; level {isa_in_use()}, 1 thread")
    for dt in ("f32", "bf16"):
        limit = ceiling(dt, options.seconds)
        for name, (m, k, columns) in SHARED.items():
            several, merged = [product(dt, m, k, n) for n in columns], product(dt, m, k, sum(columns))
            apart = together = float("inf")
            for _ in range(options.rounds):
                share = options.seconds / len(several)
                apart = min(apart, sum(best_seconds(call, share) for call in several))
                together = min(together, best_seconds(merged, options.seconds))
            flops = 2 * m * k * sum(columns) / 1e9
            note = f"{flops / apart / limit:.0%} of the ceiling apart, {flops / together / limit:.0%} as one"
            show(Figure(f"{dt}, {name}: time apart over time as one", apart / together, "x", note=note))


if __name__ == "__main__":
    main()
