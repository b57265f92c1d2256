"""The cost of tracing: the same tasks with it and without, in pairs.

Claim: at most 3% while it is on, at the granularity of planned tasks (from about 10 us); nothing
while it is off (one load per task, below the noise of pairs of runs: the second column of "off"
shows the noise).

Run: python benchmarks/runtime/tracing.py [--pairs 15]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, record
from machine import machine

from tilewise.runtime import InOut, Input, Runtime

NUM_TASKS = 4000
SIZES = (4096, 16384, 65536, 262144)  # bytes per operand: roughly 0.3 to 20 us of work


def run_ns(rt: Runtime, kernel: object, params: list[list[object]], size: int, traced: bool) -> float:
    """Nanoseconds per task of one run; entering and leaving the traced block is not timed."""

    def tasks() -> float:
        begin = time.perf_counter_ns()
        for i in range(NUM_TASKS):
            rt.submit(kernel, params[i % len(params)], scalars=(size,))
        rt.wait_all()
        return (time.perf_counter_ns() - begin) / NUM_TASKS

    if not traced:
        return tasks()
    with rt.trace() as tracing:
        spent = tasks()
    assert len(tracing.trace.tasks) == NUM_TASKS
    return spent


def main() -> None:
    """Print one line per task size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    print(f"{machine()}; {NUM_TASKS} tasks")
    print(f"{'bytes':>8} {'off ns':>9} {'off again':>9} {'on ns':>9} {'on / off':>9}")
    with Runtime() as rt:
        kernel = rt.kernel("sum_f32")
        for size in SIZES:
            arrays = [np.zeros(size // 4, np.float32) for _ in range(8)]
            with rt.registered(*arrays) as buffers:
                params = [[InOut(buffers[i]), Input(buffers[i + 4])] for i in range(4)]
                off, again, on = [], [], []
                for _ in range(pairs):
                    off.append(run_ns(rt, kernel, params, size, traced=False))
                    on.append(run_ns(rt, kernel, params, size, traced=True))
                    again.append(run_ns(rt, kernel, params, size, traced=False))
                base = statistics.median(off)
                ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
                print(
                    f"{size:8} {base:9.0f} {statistics.median(again):9.0f} {statistics.median(on):9.0f} {ratio:9.3f}"
                )
                record(Figure(f"tasks of {size} bytes, traced", ratio, "x untraced", less_is_better=True))


if __name__ == "__main__":
    main()
