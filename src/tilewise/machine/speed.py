"""Measures the speed that cores and memory reach."""

from __future__ import annotations

import threading
import time

import numpy as np

from tilewise.core.limits import num_cores
from tilewise.kernels.isa import run

__all__ = ["PROBE_BYTES", "measure_bandwidth", "measure_flops"]

PROBE_BYTES = 1 << 28
"""Bytes read to measure the bandwidth; larger than any cache."""
_PROBE_STEPS = 200_000  # about ten milliseconds
_PROBE_ROUNDS = 3


def measure_flops(dtype: str) -> float:
    """Multiply-add operations per second without memory access: the speed of one core in the best
    of some rounds, times the number of cores.
    """
    out = np.zeros((1, 1), np.float32)
    run(f"peak_{dtype}", [out], [1])
    flops, best = float(out[0, 0]) * _PROBE_STEPS, 0.0
    for _ in range(_PROBE_ROUNDS):
        started = time.perf_counter()
        run(f"peak_{dtype}", [out], [_PROBE_STEPS])
        best = max(best, flops / (time.perf_counter() - started))
    return best * num_cores()


def measure_bandwidth() -> float:
    """Bytes per second that all cores read together, in the best of some rounds."""
    count = num_cores()
    array = np.ones(PROBE_BYTES // 8, np.float64)
    parts = np.array_split(array, count)
    best = 0.0
    for _ in range(_PROBE_ROUNDS):
        threads = [threading.Thread(target=np.max, args=(part,)) for part in parts]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, PROBE_BYTES / (time.perf_counter() - started))
    return best
