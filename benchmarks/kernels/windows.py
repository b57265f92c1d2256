"""Claim: attention over a sliding window takes time as the window, not as the sequence; PyTorch's masks save nothing.

Prints milliseconds per call for one sequence of 4096 tokens (4 query heads, 1 key/value head of 64), forward and
backward: causal, over windows, with capped scores, and both ways over a sequence that is half padding; and microseconds
for one token at the end of a paged cache. The peer is PyTorch's scaled_dot_product_attention, with a mask where
scores are not causal alone, or step by step where they are capped; key/value heads are repeated beforehand.

    python benchmarks/kernels/windows.py [--seconds 0.5]
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, record
from machine import machine
from matmul import best_seconds
from rest import Call, repeated, values

from tilewise.kernels.isa import isa_in_use, run

SEQ, HEADS, KV_HEADS, DIM = 4096, 4, 1, 64


@dataclass(frozen=True)
class Case:
    """Changes of the scores; 0 has no effect."""

    name: str
    window: int = 0
    softcap: float = 0.0
    length: int = 0


CASES = [
    Case("causal"),
    Case("window 2048", 2048),
    Case("window 512", 512),
    Case("window 64", 64),
    Case("softcap", softcap=50.0),
    Case("window 512, softcap", 512, 50.0),
    Case("both ways, half padding", length=SEQ // 2),
]


def own(case: Case, dt: str) -> tuple[Call, Call]:
    """The kernels, forward and backward."""
    q, k, v = (values(SEQ, heads * DIM, dt) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, lse, dout = values(SEQ, HEADS * DIM, dt), values(SEQ, HEADS, "f32"), values(SEQ, HEADS * DIM, dt)
    grads = [np.empty_like(x) for x in (q, k, v)]
    lengths = np.array([[case.length]], np.int32) if case.length else None
    sizes, floats = [SEQ, HEADS, KV_HEADS, DIM, case.length == 0], [DIM**-0.5, case.softcap]

    def forward(n: int) -> None:
        run(f"attention_{dt}", [out, lse, q, k, v, lengths, None], [*sizes, case.window], floats, repeat=n)

    def backward(n: int) -> None:
        tiles = [*grads, dout, out, lse, q, k, v, lengths, None]
        run(f"attention_backward_{dt}", tiles, [*sizes, 0, case.window], floats, repeat=n)

    forward(1)
    return forward, backward


def own_paged(case: Case, dt: str) -> Call:
    """One token at the end of the cache."""
    q, k, v = (
        values(rows, heads * DIM, dt) for rows, heads in ((1, HEADS), (SEQ, KV_HEADS), (SEQ, KV_HEADS))
    )
    table, first = np.arange(SEQ // 64, dtype=np.int32)[None], np.zeros((1, 1), np.int32)
    tiles = [np.empty_like(q), q, k, v, first + (SEQ - 1), first, table]
    sizes, floats = [64, HEADS, KV_HEADS, DIM, case.window], [DIM**-0.5, case.softcap]
    return lambda n: run(f"attention_paged_{dt}", tiles, sizes, floats, repeat=n)


def peer(case: Case, dt: str) -> tuple[Call, Call]:
    """The same in PyTorch."""
    dtype = torch.float32 if dt == "f32" else torch.bfloat16
    q, k, v = (torch.randn(1, HEADS, SEQ, DIM).to(dtype).requires_grad_() for _ in range(3))
    query, position = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None, :]
    seen = (position <= query) & (position > query - (case.window or SEQ))
    if case.length:
        seen = (position < case.length).expand(SEQ, SEQ)

    def forward() -> torch.Tensor:
        if case.softcap:
            scores = case.softcap * torch.tanh(q @ k.mT * (DIM**-0.5 / case.softcap))
            return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        attention = torch.nn.functional.scaled_dot_product_attention
        plain = not case.window and not case.length
        return attention(q, k, v, is_causal=True) if plain else attention(q, k, v, attn_mask=seen)

    result = forward()
    backward = partial(torch.autograd.grad, result, [q, k, v], torch.ones_like(result), retain_graph=True)
    return repeated(forward), repeated(backward)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="time per figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"{machine('torch')}; level {isa_in_use()}, 1 thread; milliseconds, paged microseconds")
    for dt in ("f32", "bf16"):
        print(f"\n{dt:24} {'forward':>9} {'torch':>9} {'backward':>9} {'torch':>9} {'paged':>9}")
        for case in CASES:
            pairs = zip(own(case, dt), peer(case, dt))
            figures = [best_seconds(call, seconds) * 1e3 for pair in pairs for call in pair]
            paged = "" if case.length else f"{best_seconds(own_paged(case, dt), seconds) * 1e6:9.1f}"
            print(f"{case.name:24} {' '.join(f'{x:9.1f}' for x in figures)} {paged}")
            for way, (own_ms, peer_ms) in zip(("forward", "backward"), (figures[:2], figures[2:])):
                what = f"{dt}, {case.name}: {way}"
                record(Figure(what, own_ms, "ms", less_is_better=True, peers={"torch": peer_ms}))


if __name__ == "__main__":
    main()
