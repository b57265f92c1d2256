"""Claim: the matmul kernels reach at least 85% of one core's measured ceiling on the demo model's tiles.

Prints GFLOP/s of matmul, matmul_dx and matmul_dw per shape and dtype, their share of the ceiling (an in-
register loop of the same instructions, measured in the same run), and torch.mm on one thread. Operands are
64-byte aligned as in a device's arena; contractions are cut into 8 chunks as in training. PyTorch's fp32 is
MKL's, which takes slower ways on processors of other makers.

    python benchmarks/kernels_matmul.py [--seconds 0.15]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from tilewise.kernels import pack_weight, packed_elements
from tilewise.kernels.isa import isa_in_use, run

SHAPES = [(512, 768, 256), (512, 256, 256), (512, 256, 768), (512, 4096, 256), (1024, 128, 256)]
TOKENS, LEAF_ROWS, CHUNKS = 2048, 512, 8
NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
Array = NDArray[np.generic]


def aligned(x: Array) -> Array:
    """A copy that starts on a cache line."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    out = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def best_seconds(call: Callable[[int], object], seconds: float) -> float:
    """Least time of one call; `call(n)` makes n of them.

    Samples last about a millisecond, less than a scheduler's time slice: on a busy machine some are
    undisturbed.
    """
    repeat, spent = 1, 0.0
    call(1)
    while spent < 0.001:
        repeat *= 2
        start = time.perf_counter()
        call(repeat)
        spent = time.perf_counter() - start
    least, end = spent, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call(repeat)
        least = min(least, time.perf_counter() - start)
    return least / repeat


def ceiling(dt: str, seconds: float) -> float:
    """GFLOP/s of multiply-adds that touch no memory."""
    out = np.zeros((1, 1), np.float32)
    run(f"peak_{dt}", [out], [1])
    flops = float(out[0, 0]) * 10_000
    return flops / best_seconds(lambda n: run(f"peak_{dt}", [out], [10_000], repeat=n), seconds) / 1e9


def chunked(length: int) -> list[int]:
    """Ranges of CHUNKS even chunks."""
    return [x for c in range(CHUNKS) for x in (length * c // CHUNKS, length * (c + 1) // CHUNKS)]


def measure(dt: str, shape: tuple[int, int, int], seconds: float) -> dict[str, float]:
    """GFLOP/s by kernel."""
    m, n, k = shape
    gen = np.random.default_rng(0)

    def values(rows: int, cols: int) -> Array:
        return aligned(gen.standard_normal((rows, cols)).astype(NUMPY[dt]))

    a, d, y, dx = values(m, k), values(m, n), values(m, n), values(m, k)
    w = (aligned(pack_weight(gen.standard_normal((n, k)), dt)), n, k)
    x, dy = values(TOKENS, k), values(TOKENS, n)
    dw = (aligned(np.zeros(packed_elements(n, k), np.float32)), n, k)
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
            lambda r: run(f"matmul_{dt}", [y, None, a, w], [0, 1, CHUNKS, *chunked(k)], repeat=r),
        ),
        "dx": (
            flops,
            lambda r: run(f"matmul_dx_{dt}", [dx, None, d, w], [0, 1, CHUNKS, *chunked(n)], repeat=r),
        ),
        "dw": (
            2 * TOKENS * n * k,
            lambda r: run(f"matmul_dw_{dt}", [dw, dy, x, None, None], [LEAF_ROWS, 0, 0, 0], repeat=r),
        ),
        "torch.mm": (flops, torch_mm),
    }
    return {name: count / best_seconds(call, seconds) / 1e9 for name, (count, call) in calls.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=0.15, help="time per figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(
        f"{platform.processor() or platform.machine()}, level {isa_in_use()}, torch {torch.__version__}, 1 thread"
    )
    for dt in ("f32", "bf16"):
        # The larger of two, before and after: a disturbed ceiling would flatter every share.
        before = ceiling(dt, seconds)
        figures = {shape: measure(dt, shape, seconds) for shape in SHAPES}
        limit = max(before, ceiling(dt, seconds))
        print(f"\n{dt}: ceiling {limit:.0f} GFLOP/s; dw over {TOKENS} tokens")
        print(f"{'m x n x k':>16} {'matmul':>12} {'dx':>12} {'dw':>12} {'torch.mm':>12}")
        for shape, row in figures.items():
            cells = "".join(f" {value:6.0f} ({value / limit:.0%})".rjust(13) for value in row.values())
            print(f"{' x '.join(map(str, shape)):>16}{cells}")


if __name__ == "__main__":
    main()
