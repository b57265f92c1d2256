"""Question: how far from the pace of memory is an optimizer's update, whose program comes with the call?

Prints milliseconds of one AdamW step on arrays as large as GPT-2 small has them, the share of the memory limit that it
reaches, and the peer's time. The limit is the bytes moved (weight, two moments and gradient read, weight and moments
written, and the bf16 copy) over the bandwidth of `copy` on an array as large, reads and writes counted. The peer is
PyTorch's fused AdamW on one thread, in fp32.

    python benchmarks/optimizer_update.py [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from kernels_matmul import NUMPY, aligned, best_seconds

from tilewise.kernels.isa import isa_in_use, run
from tilewise.optim import AdamW
from tilewise.optim.rule import take_down

SHAPES = {"wte (50,257 x 768)": (50257, 768), "mlp (3,072 x 768)": (3072, 768), "norm (768)": (1, 768)}
ADAMW = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
STEP, RATE = 3, 3e-4


def arrays(shape: tuple[int, int]) -> list[np.ndarray]:
    """Weight, moments and gradient on cache lines."""
    generator = np.random.default_rng(0)
    return [aligned(np.abs(generator.standard_normal(shape, np.float32))) for _ in range(4)]


def ours(shape: tuple[int, int], dt: str, seconds: float) -> float:
    """Seconds of one step of the kernel."""
    program = take_down(ADAMW.update, ADAMW.states, ADAMW.per_step)
    hyper = np.array([ADAMW.values(STEP, RATE)], np.float32)
    clip = np.array([[1.0, 0.5]], np.float32)
    copy = None if dt == "f32" else aligned(np.zeros(shape, NUMPY[dt]))
    tiles = [copy, *arrays(shape), hyper, clip]
    ints = [0, len(ADAMW.states), len(program.steps) // 4, *program.steps, *program.left]
    constants = list(program.constants)
    return best_seconds(lambda n: run(f"update_{dt}", tiles, ints, constants, repeat=n), seconds)


def limit(shape: tuple[int, int], dt: str, seconds: float) -> float:
    """Seconds in which memory moves the bytes of one step."""
    source, target, *_ = arrays(shape)
    copied = best_seconds(lambda n: run("copy_f32", [target, source], repeat=n), seconds)
    return copied * (28 if dt == "f32" else 30) / 8


def theirs(shape: tuple[int, int], seconds: float) -> float:
    """Seconds of one fused step of PyTorch."""
    weight, _, _, gradient = (torch.from_numpy(x) for x in arrays(shape))
    weight.grad = gradient
    peer = torch.optim.AdamW([weight], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    def many(count: int) -> None:
        for _ in range(count):
            peer.step()

    return best_seconds(many, seconds)


def main() -> None:
    """Print one line per shape and element type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"instruction set {isa_in_use()}; one AdamW step, one thread")
    print(
        f"{'array':<22}{'copy':>6}{'ms':>10}{'limit ms':>10}{'of limit':>10}{'PyTorch ms':>12}{'speedup':>9}"
    )
    for name, shape in SHAPES.items():
        peer = theirs(shape, seconds)
        for dt in ("f32", "bf16"):
            own, least = ours(shape, dt, seconds), limit(shape, dt, seconds)
            kind = "none" if dt == "f32" else dt
            print(
                f"{name:<22}{kind:>6}{own * 1e3:>10.4f}{least * 1e3:>10.4f}{least / own:>10.2f}{peer * 1e3:>12.4f}"
                f"{peer / own:>8.2f}x"
            )


if __name__ == "__main__":
    main()
