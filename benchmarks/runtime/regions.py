"""Cost of naming a box of a buffer, compared with submitting the task that uses it.

Claim: `buffer[i, j]` takes at most 1.5 us and less than a submission; a tile of `buffer.tiles(...)`
at most 0.1 us. All figures are of one thread, in Python, without the loop's own time; the median of
the rounds.

Run: python benchmarks/runtime/regions.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, show
from machine import machine

from tilewise.runtime import Input, Runtime

COUNT = 10_000
PLACES = [(n % 16, n // 16 % 16) for n in range(COUNT)]


def ns_per_call(call: Callable[[int, int], object], rounds: int) -> float:
    """Nanoseconds of one call, without those of an empty one."""

    def spent(body: Callable[[int, int], object]) -> float:
        begin = time.perf_counter_ns()
        for i, j in PLACES:
            body(i, j)
        return (time.perf_counter_ns() - begin) / COUNT

    return statistics.median(spent(call) - spent(lambda i, j: None) for _ in range(rounds))


def main() -> None:
    """Print one line per way of naming a box."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"{machine()}; {COUNT} calls")
    with Runtime(num_workers=1, window=4096) as rt:
        h = rt.register(np.zeros((16 * 32, 16 * 32), np.float32))
        grid = h.tiles(32, 32)
        params = [Input(h)]
        figures = {
            "submit": ns_per_call(lambda i, j: rt.submit(None, params), rounds),
            "h[i, j]": ns_per_call(lambda i, j: h[i, j], rounds),
            "h[a:b, c:d]": ns_per_call(lambda i, j: h[i * 32 : i * 32 + 32, j * 32 : j * 32 + 32], rounds),
            "grid[i, j]": ns_per_call(lambda i, j: grid[i, j], rounds),
        }
        rt.wait_all()
    for name, goal in (("submit", None), ("h[i, j]", 1500), ("h[a:b, c:d]", 1500), ("grid[i, j]", 100)):
        note = f"{figures[name] / figures['submit']:.2f} times a submission"
        show(Figure(name, figures[name], "ns", less_is_better=True, goal=goal, note=note))


if __name__ == "__main__":
    main()
