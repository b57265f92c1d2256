"""Question: how far from the pace of memory is an optimizer's update, whose program comes with the call?

Prints nanoseconds per element of one AdamW step, on arrays in the caches and as large as GPT-2 small has them: by the
loop that its shape has, block by block (as an optimizer of another shape runs), the limit of memory, and the peers. The
limit is the bytes moved (weight, two moments and gradient read, weight and moments written, and the bf16 copy) over the
bandwidth of `copy` on an array as large, reads and writes counted; beyond the caches a copy also reads what it
overwrites, which an update has read anyway, so the update may be faster. The peers are PyTorch's fused and foreach
AdamW on one thread, in fp32. All take turns, round by round; medians over the rounds are printed, and of the ratios.

    python benchmarks/kernels/optimizer_update.py [--seconds 0.1] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, record
from machine import machine
from matmul import NUMPY, aligned, best_seconds

from tilewise.kernels import UPDATE_STEPS
from tilewise.kernels.isa import isa_in_use, run
from tilewise.optim import AdamW
from tilewise.optim.rule import Program, record_update

SHAPES = {
    "norm (768)": (1, 768),
    "in cache (64 x 768)": (64, 768),
    "mlp (3,072 x 768)": (3072, 768),
    "wte (50,257 x 768)": (50257, 768),
}
ADAMW = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
STEP, RATE = 3, 3e-4
Call = Callable[[int], object]


def arrays(shape: tuple[int, int]) -> list[np.ndarray]:
    """Weight, moments and gradient on cache lines."""
    generator = np.random.default_rng(0)
    return [aligned(np.abs(generator.standard_normal(shape, np.float32))) for _ in range(4)]


def ours(shape: tuple[int, int], dt: str, program: Program) -> Call:
    """Steps of the kernel."""
    hyper = np.array([ADAMW.values(STEP, RATE)], np.float32)
    clip = np.array([[1.0, 0.5]], np.float32)
    copy = None if dt == "f32" else aligned(np.zeros(shape, NUMPY[dt]))
    tiles = [copy, *arrays(shape), hyper, clip]
    ints = [0, len(ADAMW.states), len(program.steps) // 4, *program.steps, *program.left]
    constants = list(program.constants)
    return lambda n: run(f"update_{dt}", tiles, ints, constants, repeat=n)


def copying(shape: tuple[int, int]) -> Call:
    """Copies of an array as large."""
    source, target, *_ = arrays(shape)
    return lambda n: run("copy_f32", [target, source], repeat=n)


def theirs(shape: tuple[int, int], how: str) -> Call:
    """Steps of PyTorch."""
    weight, _, _, gradient = (torch.from_numpy(x) for x in arrays(shape))
    weight.grad = gradient
    peer = torch.optim.AdamW([weight], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **{how: True})

    def many(count: int) -> None:
        for _ in range(count):
            peer.step()

    return many


def measure(name: str, dt: str, rounds: int, seconds: float) -> None:
    """One line."""
    shape = SHAPES[name]
    recorded = record_update(ADAMW.update, ADAMW.states, ADAMW.per_step)
    unread = (list(UPDATE_STEPS).index("negate"), 0, 0, 0)  # nothing reads it, but no known shape has it
    calls = {
        "loop": ours(shape, dt, recorded),
        "blocks": ours(shape, dt, replace(recorded, steps=(*recorded.steps, *unread))),
        "limit": copying(shape),
        "fused": theirs(shape, "fused"),
        "foreach": theirs(shape, "foreach"),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            share = (28 if dt == "f32" else 30) / 8 if name == "limit" else 1.0
            times[name].append(best_seconds(call, seconds) * share)
    size = shape[0] * shape[1]
    taken = {way: statistics.median(t) / size * 1e9 for way, t in times.items()}
    copy, peers = "none" if dt == "f32" else dt, {way: taken[way] for way in ("fused", "foreach")}
    what = f"{name}, copy {copy}: an element"
    record(Figure(what, taken["loop"], "ns", less_is_better=True, peers=peers, limit=taken["limit"]))
    own = times.pop("loop")
    ratios = [statistics.median(b / a for a, b in zip(own, times[name])) for name in times]
    columns = "".join(f"{value:>9.3f}" for value in taken.values())
    print(f"{copy:>6}{columns}  " + "".join(f"{r:>9.2f}x" for r in ratios))


def main() -> None:
    """Print a line per array and element type of the copy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.1, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine('torch')}; level {isa_in_use()}; one AdamW step, one thread")
    print(f"{'':<22}{'':>6}{'nanoseconds per element':^45}  {'times those of the loop':^40}")
    names = ("blocks", "limit", "fused", "foreach")
    print(
        f"{'array':<22}{'copy':>6}{'loop':>9}"
        + "".join(f"{n:>9}" for n in names)
        + "  "
        + "".join(f"{n:>10}" for n in names)
    )
    for name in SHAPES:
        for dt in ("f32", "bf16"):
            print(f"{name:<22}", end="")
            measure(name, dt, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
