"""Claim: on the demo model's tiles attention, gates, the loss and an embedding's gradient take less time than
PyTorch's ops on one thread.

Prints microseconds per call and the peer's for attention forward and backward (two sequences of 256 tokens,
8 query heads, 4 key/value heads of 32), silu_gate and its gradient (512 x 768), cross-entropy with its
gradient (512 x 4096), and the gradient of an embedding (512 tokens, 16,384 x 768; fp32, but of PyTorch in bf16
half as large). PyTorch's attention gets key/value heads repeated beforehand, which its fast path
needs; its backward figures are those of autograd without the forward pass.

    python benchmarks/kernels/rest.py [--seconds 0.15]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, record
from machine import machine
from matmul import NUMPY, Array, aligned, best_seconds, even_ranges

from tilewise.kernels.isa import isa_in_use, run

SEQUENCES, SEQ, HEADS, KV_HEADS, DIM = 2, 256, 8, 4, 32
ROWS, WIDTH, VOCAB, TABLE = SEQUENCES * SEQ, 768, 4096, 16_384
Call = Callable[[int], object]


def values(rows: int, cols: int, dt: str) -> Array:
    """Normal values on cache lines."""
    return aligned(np.random.default_rng(0).standard_normal((rows, cols)).astype(NUMPY[dt]))


def named_rows() -> NDArray[np.int32]:
    """The rows of a table that the tokens select."""
    return np.random.default_rng(1).integers(0, TABLE, ROWS, dtype=np.int32)


def kernels(dt: str) -> dict[str, Call]:
    """Every kernel as a function that makes so many calls."""
    calls: dict[str, Call] = {}

    def add(name: str, kernel: str, tiles: list[Any], ints: list[int], floats: list[float]) -> None:
        calls[name] = lambda n: run(f"{kernel}_{dt}", tiles, ints, floats, repeat=n)
        calls[name](1)

    q, k, v = (values(ROWS, heads * DIM, dt) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, lse, dout = values(ROWS, HEADS * DIM, dt), values(ROWS, HEADS, "f32"), values(ROWS, HEADS * DIM, dt)
    shape, scale = [SEQ, HEADS, KV_HEADS, DIM, 1], [DIM**-0.5, 0.0]
    add("attention", "attention", [out, lse, q, k, v, None], [*shape, 0], scale)
    grads = [np.empty_like(x) for x in (q, k, v)]
    tiles = [*grads, dout, out, lse, q, k, v, None]
    add("attention_backward", "attention_backward", tiles, [*shape, 0, 0], scale)
    h, g, u, dg, du = (values(ROWS, WIDTH, dt) for _ in range(5))
    add("silu_gate", "silu_gate", [h, g, u], [], [])
    add("silu_gate_backward", "silu_gate_backward", [dg, du, h, g, u], [], [])
    logits, stats, sums = values(ROWS, VOCAB, dt), values(ROWS, 2, "f32"), values(ROWS, 1, "f32")
    labels = np.arange(ROWS, dtype=np.int32)[:, None]
    add("max", "cross_entropy_max", [stats, logits, labels], [0, -100], [])
    add("sum", "cross_entropy_sum", [sums, logits, stats], even_ranges(VOCAB, 8), [])
    count = np.full((1, 1), 1 / ROWS, np.float32)
    tiles = [np.empty_like(logits), values(ROWS, 1, "f32"), logits, stats, sums, labels, count]
    add("cross_entropy_backward", "cross_entropy_grad", tiles, [0, -100], [])
    table = aligned(np.empty((TABLE, WIDTH), np.float32))
    tiles = [(table, TABLE, WIDTH), None, None, named_rows()[:, None], h]
    add("embedding_backward", "matmul_dw", tiles, [SEQ, 0, 0, 0], [])
    largest, total = calls.pop("max"), calls.pop("sum")
    calls["cross_entropy"] = lambda n: (largest(n), total(n))
    return calls


def repeated(call: Callable[[], object]) -> Call:
    """A function that makes so many calls."""

    def many(count: int) -> None:
        for _ in range(count):
            call()

    return many


def peers(dt: str) -> dict[str, Call]:
    """The same computations in PyTorch."""
    dtype = torch.float32 if dt == "f32" else torch.bfloat16

    def split(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    q, k, v = (split(SEQUENCES, HEADS, SEQ, DIM) for _ in range(3))
    gate, up, logits = split(ROWS, WIDTH), split(ROWS, WIDTH), split(ROWS, VOCAB)
    labels = torch.arange(ROWS)
    forward: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "attention": (lambda: scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]),
        "silu_gate": (lambda: silu(gate) * up, [gate, up]),
        "cross_entropy": (lambda: cross_entropy(logits, labels), [logits]),
    }
    calls: dict[str, Call] = {}
    for name, (call, batch_splits) in forward.items():
        result = call()
        backward = partial(
            torch.autograd.grad, result, batch_splits, torch.ones_like(result), retain_graph=True
        )
        calls[name] = repeated(call)
        calls[f"{name}_backward"] = repeated(backward)
    ids, rows = torch.from_numpy(named_rows()).long(), torch.randn(ROWS, WIDTH).to(dtype)
    dense = torch.ops.aten.embedding_dense_backward
    calls["embedding_backward"] = repeated(partial(dense, rows, ids, TABLE, -1, False))
    return calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=0.15, help="time per figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"{machine('torch')}; level {isa_in_use()}, 1 thread; microseconds")
    for dt in ("f32", "bf16"):
        print(f"\n{dt:24} {'tilewise':>10} {'torch':>10}")
        other = peers(dt)
        for name, call in kernels(dt).items():
            own, peer = (best_seconds(x, seconds) * 1e6 for x in (call, other[name]))
            print(f"{name:24} {own:10.0f} {peer:10.0f}")
            record(Figure(f"{dt}: {name}", own, "us", less_is_better=True, peers={"torch": peer}))


if __name__ == "__main__":
    main()
