"""Claim: attention over 2,048 tokens reaches 65% of one core's measured ceiling of products forward and 55% backward,
goal 80% and 70%, for heads of 64 and 128.

Multiply-adds of pairs of a query and a position that it sees are counted, and neither exponentials nor pairs that a
block computes and drops. Prints the share per element type and head, causal and not, and of the shorter sequences of
GPT-2 small; the ceiling is a loop of products on registers. The peer is PyTorch's scaled_dot_product_attention on one
thread, whose backward figure is autograd's without the forward pass.

Time is that of the thread: a program that takes the core's turns does not count, a neighbour in the cache, on the
memory or on the core's other thread does. So every call takes turns with the ceiling, and a share is the median of all
pairs; a call of one head takes some milliseconds.

    python benchmarks/kernels/attention.py [--seconds 1]
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, show
from machine import machine
from matmul import NUMPY, aligned, ceiling_in_turns, in_turns
from rest import Call, repeated

from tilewise.kernels.isa import isa_in_use, run

MUST, GOAL = {"forward": 65, "backward": 55}, {"forward": 80, "backward": 70}  # percent, of 2,048 tokens


@dataclass(frozen=True)
class Shape:
    """One sequence; every query head has keys and values of its own."""

    heads: int
    dim: int
    seq: int = 2048
    causal: bool = True

    @property
    def pairs(self) -> int:
        """Of a query and a position that it sees, over all heads."""
        return self.heads * (self.seq * (self.seq + 1) // 2 if self.causal else self.seq**2)

    def __str__(self) -> str:
        return f"{self.seq} tokens, heads of {self.dim}{'' if self.causal else ', not causal'}"


SHAPES = [Shape(1, 64), Shape(1, 128), Shape(1, 64, causal=False), Shape(12, 64, 256)]


def ours(shape: Shape, dt: str) -> dict[str, Call]:
    """Calls of the kernels."""
    draw = np.random.default_rng(0)
    width = shape.heads * shape.dim
    q, k, v, dout = (aligned(draw.standard_normal((shape.seq, width)).astype(NUMPY[dt])) for _ in range(4))
    out, lse, grads = (
        np.empty_like(q),
        np.empty((shape.seq, shape.heads), np.float32),
        [q.copy() for _ in "qkv"],
    )
    sizes = [shape.seq, shape.heads, shape.heads, shape.dim, int(shape.causal)]
    scale = [shape.dim**-0.5, 0.0]
    return {
        "forward": lambda n: run(
            f"attention_{dt}", [out, lse, q, k, v, None, None], [*sizes, 0], scale, repeat=n
        ),
        "backward": lambda n: run(
            f"attention_backward_{dt}",
            [*grads, dout, out, lse, q, k, v, None, None],
            [*sizes, 0, 0],
            scale,
            repeat=n,
        ),
    }


def theirs(shape: Shape, dt: str) -> dict[str, Call]:
    """The same in PyTorch."""
    dtype = torch.float32 if dt == "f32" else torch.bfloat16
    batch_splits = [
        torch.randn(1, shape.heads, shape.seq, shape.dim).to(dtype).requires_grad_() for _ in "qkv"
    ]
    call = partial(scaled_dot_product_attention, *batch_splits, is_causal=shape.causal)
    out = call()
    backward = partial(torch.autograd.grad, out, batch_splits, torch.ones_like(out), retain_graph=True)
    return {"forward": repeated(call), "backward": repeated(backward)}


def main() -> None:
    """Print a line per element type, shape and direction."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time per figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"{machine('torch')}; level {isa_in_use()}, 1 thread")
    for dt in ("f32", "bf16"):
        limit = ceiling_in_turns(dt)
        for shape in SHAPES:
            own, peer = ours(shape, dt), theirs(shape, dt)
            for way, products in (("forward", 2), ("backward", 5)):
                flops = 2 * products * shape.pairs * shape.dim
                mine, other = (100 * in_turns(flops, c[way], limit, seconds).share for c in (own, peer))
                asked = {"must": MUST[way], "goal": GOAL[way]} if shape.seq == Shape.seq else {}
                what = f"{dt}, {shape}: {way}, of the ceiling"
                show(Figure(what, mine, "%", peers={"torch": other}, limit=100, **asked))


if __name__ == "__main__":
    main()
