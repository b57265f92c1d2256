"""Claim: norms, softmax, gates and AdamW on arrays beyond the caches move their bytes at 75%, goal 90%, of the
bandwidth of a triad (a = b + s c, fp32) on one core.

Bytes are those that a kernel must read and write once (`kernels/table.py`), as the triad's twelve per element. What a
cache brings in only to overwrite it counts for neither; what is written past the caches may so exceed the triad. bf16
halves the bytes and none of the arithmetic, so kernels with exponentials are bound by those. The peers are PyTorch's
ops on one thread.

Time is that of the thread: a neighbour on the core does not count, one on the memory does. Rounds visit all kernels;
medians of the rounds are printed.

    python benchmarks/kernels/memory.py [--seconds 0.05] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numba import njit

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, show
from machine import machine
from matmul import NUMPY, Array, aligned, best_seconds
from optimizer_update import ADAMW, RATE, STEP
from rest import Call, repeated

from tilewise.kernels import kernel_spec
from tilewise.kernels.isa import isa_in_use, run
from tilewise.optim.rule import record_update

ROWS, WIDTH = 16_384, 1_024  # 64 MB in fp32
MUST, GOAL = 75, 90  # percent of the triad
F = torch.nn.functional


@njit(fastmath=True)  # type: ignore[misc]
def _triad(a: np.ndarray, b: np.ndarray, c: np.ndarray, s: np.float32) -> None:
    for i in range(len(a)):
        a[i] = b[i] + s * c[i]


def triad() -> Call:
    """Calls of a triad on three arrays of fp32."""
    a, b, c = (aligned(np.ones((ROWS, WIDTH), np.float32)).reshape(-1) for _ in range(3))
    return repeated(lambda: _triad(a, b, c, np.float32(0.5)))


def array(dt: str, rows: int = ROWS, width: int = WIDTH) -> Array:
    """Normal values on cache lines."""
    return aligned(np.random.default_rng(0).standard_normal((rows, width)).astype(NUMPY[dt]))


def kernels(dt: str) -> dict[str, tuple[Call, float]]:
    """Every kernel: calls of it, and the bytes that one moves."""
    calls_by_name: dict[str, tuple[Call, float]] = {}

    def add(
        base: str, tiles: list[Any], ints: list[int] | None = None, floats: list[float] | None = None
    ) -> None:
        name = f"{base}_{dt}"
        sizes = {"m": ROWS, "d": WIDTH, "item": 2 if dt == "bf16" else 4, "states": 2, "steps": 0}
        calls = partial(run, name, tiles, ints or [], floats or [])
        calls_by_name[base] = (lambda n: calls(repeat=n)), kernel_spec(name).bytes(sizes)

    x, y, z, w, v = (array(dt) for _ in range(5))
    gain, stats = np.ones((1, WIDTH), NUMPY[dt]), np.ones((ROWS, 2), np.float32)
    add("rms_norm", [y, stats[:, :1].copy(), x, gain], [0], [1e-6, 0.0])
    add("softmax", [y, x])
    add("softmax_backward", [z, x, y])
    add("silu_gate", [y, x, z])
    add("silu_gate_backward", [y, z, x, w, v])
    add("gelu_tanh", [y, x])
    add("add", [y, x, z])
    program = record_update(ADAMW.update, ADAMW.states, ADAMW.per_step)
    hyper, clip = np.array([ADAMW.values(STEP, RATE)], np.float32), np.array([[1.0, 0.5]], np.float32)
    copy = None if dt == "f32" else w
    tiles = [copy, *(array("f32") for _ in range(4)), hyper, clip]
    ints = [0, len(ADAMW.states), len(program.steps) // 4, *program.steps, *program.left]
    add("update", tiles, ints, list(program.constants))
    return calls_by_name


def peers(dt: str) -> dict[str, Call]:
    """The same in PyTorch."""
    dtype = torch.float32 if dt == "f32" else torch.bfloat16
    x, y, z = (torch.randn(ROWS, WIDTH).to(dtype) for _ in range(3))
    probabilities = torch.softmax(x, -1)
    weight = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight.grad = torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW([weight], lr=RATE, betas=(0.9, 0.95), fused=True)
    calls: dict[str, Callable[[], object]] = {
        "rms_norm": partial(F.rms_norm, x, (WIDTH,), torch.ones(WIDTH, dtype=dtype)),
        "softmax": partial(torch.softmax, x, -1),
        "softmax_backward": partial(torch._softmax_backward_data, y, probabilities, -1, dtype),
        "silu_gate": lambda: F.silu(x) * y,
        "gelu_tanh": partial(F.gelu, x, approximate="tanh"),
        "add": partial(torch.add, x, y, out=z),
        "update": optimizer.step,
    }
    return {name: repeated(call) for name, call in calls.items()}


def main() -> None:
    """Print a line per kernel and element type."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=0.05, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine('torch')}; level {isa_in_use()}, 1 thread; {ROWS} x {WIDTH}")
    for dt in ("f32", "bf16"):
        own, others, limit = kernels(dt), peers(dt), triad()
        rates: dict[str, list[float]] = {
            name: [] for name in (*own, "triad", *(f"torch {n}" for n in others))
        }
        for _ in range(options.rounds):
            rates["triad"].append(12 * ROWS * WIDTH / best_seconds(limit, options.seconds) / 1e9)
            for name, (call, moved) in own.items():
                rates[name].append(moved / best_seconds(call, options.seconds) / 1e9)
                if name in others:
                    rates[f"torch {name}"].append(moved / best_seconds(others[name], options.seconds) / 1e9)
        medians = {name: statistics.median(samples) for name, samples in rates.items()}
        print(f"{dt}: triad {medians['triad']:.1f} GB/s")
        for name in own:
            scale = 100 / medians["triad"]
            peer = {"torch": medians[f"torch {name}"] * scale} if name in others else {}
            what, note = f"{dt}: {name}, of a triad", f"{medians[name]:.1f} GB/s"
            show(Figure(what, medians[name] * scale, "%", must=MUST, goal=GOAL, peers=peer, note=note))


if __name__ == "__main__":
    main()
