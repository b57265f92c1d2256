"""Claim: forward matmuls reach 92% of one core's measured ceiling, input and weight gradients 88%.

Shapes are those of GPT-2 small's tiles (`must` figures; two_devices.py), of the demo's, and two of
llama_block.py's. Prints GFLOP/s of matmul, matmul_dx and matmul_dw per shape and dtype, their share
of the ceiling (an in-register loop of the same instructions, measured in the same run), and
torch.mm on one thread. Operands are 64-byte aligned as in a device's arena, and in a cache if they
fit one; contractions that tensor parallelism may split are cut into 8 k splits, as in training.
PyTorch's fp32 is MKL's, which takes slower ways on processors of other makers.

Time is that of the thread: a program that takes the core's turns does not count, a neighbour in the cache, on the
memory or on the core's other thread does. So every kernel takes turns of a millisecond with the ceiling: GFLOP/s are
those of the fastest turn, a share is the median of all pairs.

    python benchmarks/kernels/matmul.py [--seconds 0.15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, record
from machine import machine

from tilewise.kernels import pack_weight, packed_elements
from tilewise.kernels.isa import isa_in_use, run

# m, n, k; k splits of k in the forward product, of n in the input gradient
GPT2 = {
    "q": (256, 768, 768, 1, 8),
    "o": (256, 768, 768, 8, 1),
    "up": (256, 2048, 768, 1, 8),
    "down": (256, 768, 2048, 8, 1),
    "head": (256, 50257, 768, 1, 8),
}
DEMO = {
    "q": (512, 256, 256, 1, 8),
    "k": (1024, 128, 256, 1, 8),
    "o": (512, 256, 256, 8, 1),
    "up": (512, 768, 256, 1, 8),
    "down": (512, 256, 768, 8, 1),
    "head": (512, 4096, 256, 1, 8),
}
# Half of the columns of a large model's products, as two workers share those of one sequence.
LARGE = {
    "gate": (512, 14336, 2048, 1, 8),
    "down": (512, 2048, 14336, 8, 1),
}
MUST = {"matmul": 92, "dx": 88, "dw": 88}  # percent of the ceiling
MODELS = {
    "gpt2": (GPT2, 512, 256),
    "demo": (DEMO, 2048, 512),
    "large": (LARGE, 512, 512),
}  # with tokens and split rows of a weight gradient
WEIGHT_ROWS = 1024  # of a weight gradient's tile, at most
NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
Array = NDArray[np.generic]


class Rate(NamedTuple):
    """What a kernel reaches: GFLOP/s at best, and the share of the ceiling."""

    gflops: float
    share: float


def aligned(x: Array) -> Array:
    """A copy that starts on a cache line."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    out = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def turns(call: Callable[[int], object]) -> Callable[[], float]:
    """A function that takes about a millisecond, less than a scheduler's time slice, for seconds per call.

    `call(n)` makes n of them.
    """
    repeat, spent = 1, 0.0
    call(1)
    while spent < 0.001:
        repeat *= 2
        start = time.thread_time()
        call(repeat)
        spent = time.thread_time() - start

    def turn() -> float:
        start = time.thread_time()
        call(repeat)
        return (time.thread_time() - start) / repeat

    return turn


def best_seconds(call: Callable[[int], object], seconds: float) -> float:
    """Least time of one call; on a busy machine some turns are undisturbed."""
    turn, end = turns(call), time.thread_time() + seconds
    least = turn()
    while time.thread_time() < end:
        least = min(least, turn())
    return least


def ceiling_in_turns(dt: str) -> Callable[[], float]:
    """A function that takes GFLOP/s of multiply-adds that touch no memory."""
    out = np.zeros((1, 1), np.float32)
    run(f"peak_{dt}", [out], [1])
    flops = float(out[0, 0]) * 10_000
    turn = turns(lambda n: run(f"peak_{dt}", [out], [10_000], repeat=n))
    return lambda: flops / turn() / 1e9


def ceiling(dt: str, seconds: float) -> float:
    """The most of them."""
    turn, most, end = ceiling_in_turns(dt), 0.0, time.thread_time() + seconds
    while most == 0.0 or time.thread_time() < end:
        most = max(most, turn())
    return most


def in_turns(flops: float, call: Callable[[int], object], limit: Callable[[], float], seconds: float) -> Rate:
    """GFLOP/s of a kernel and its share of the ceiling."""
    turn, pairs, end = turns(call), [], time.monotonic() + seconds
    while not pairs or time.monotonic() < end:
        most = limit()
        pairs.append((flops / turn() / 1e9, most))
    return Rate(max(r for r, _ in pairs), statistics.median(r / most for r, most in pairs))


def even_ranges(length: int, k_splits: int) -> list[int]:
    """Ranges of k splits that are even numbers long."""
    cuts = [length * c // k_splits // 2 * 2 for c in range(k_splits)] + [length]
    return [k_splits, *(x for cut in pairwise(cuts) for x in cut)]


def measure(
    dt: str, shape: tuple[int, int, int, int, int], tokens: int, split: int, seconds: float
) -> dict[str, Rate]:
    """What each kernel reaches."""
    m, n, k, splits_of_k, splits_of_n = shape
    rows = min(n, WEIGHT_ROWS)
    wide = int(dt == "f32")
    gen = np.random.default_rng(0)

    def values(rows: int, cols: int) -> Array:
        return aligned(gen.standard_normal((rows, cols)).astype(NUMPY[dt]))

    a, d, y, dx = values(m, k), values(m, n), values(m, n), values(m, k)
    w = (aligned(pack_weight(gen.standard_normal((n, k)), dt)), n, k)
    x, dy = values(tokens, k), values(tokens, rows)
    dw = (aligned(np.zeros(packed_elements(rows, k), np.float32)), rows, k)
    left, right = (
        torch.randn(*s).to(torch.float32 if dt == "f32" else torch.bfloat16) for s in ((m, k), (k, n))
    )

    def torch_mm(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right)

    flops = 2 * m * n * k
    calls: dict[str, tuple[int, Callable[[int], object]]] = {
        "matmul": (
            flops,
            lambda r: run(f"matmul_{dt}", [y, None, a, w], [wide, 1, *even_ranges(k, splits_of_k)], repeat=r),
        ),
        "dx": (
            flops,
            lambda r: run(
                f"matmul_dx_{dt}", [dx, None, d, w], [wide, 1, *even_ranges(n, splits_of_n)], repeat=r
            ),
        ),
        "dw": (
            2 * tokens * rows * k,
            lambda r: run(f"matmul_dw_{dt}", [dw, dy, x, None, None], [split, 0, 0, 0], repeat=r),
        ),
        "torch.mm": (flops, torch_mm),
    }
    limit = ceiling_in_turns(dt)
    return {name: in_turns(count, call, limit, seconds) for name, (count, call) in calls.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=0.15, help="time per figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"{machine('torch')}; level {isa_in_use()}, 1 thread")
    for dt in ("f32", "bf16"):
        print(f"\n{dt}: ceiling {ceiling(dt, seconds):.0f} GFLOP/s")
        print(f"{'m x n x k':>28} {'matmul':>12} {'dx':>12} {'dw':>12} {'torch.mm':>12}")
        for model, (shapes, tokens, split) in MODELS.items():
            for name, shape in shapes.items():
                row = measure(dt, shape, tokens, split, seconds)
                cells = "".join(f" {r.gflops:6.0f} ({r.share:.0%})".rjust(13) for r in row.values())
                print(f"{model:>5} {name:>5} {' x '.join(map(str, shape[:3])):>16}{cells}", flush=True)
                peers = {"torch.mm": 100 * row["torch.mm"].share}
                for kernel, must in MUST.items():
                    what, share = f"{dt}, {model} {name}: {kernel}, of the ceiling", 100 * row[kernel].share
                    record(Figure(what, share, "%", must=must, goal=97, peers=peers, limit=100))


if __name__ == "__main__":
    main()
