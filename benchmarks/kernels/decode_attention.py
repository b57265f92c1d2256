"""Attention of decoding steps: one query of each of many texts, over a paged KV cache in memory.

Claim: one core reads keys and values at half of what it reads from memory at all, or more, where each head has its own;
where heads share them, products count. The limit is measured in the same run. The peer is PyTorch's
scaled_dot_product_attention on one thread, over contiguous keys and values with heads before positions, which is the
order that its kernel likes; it has no pages to look up. Shared heads are repeated for it beforehand: it reads more.

Run: python benchmarks/kernels/decode_attention.py [--texts 64] [--positions 1000] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, show
from machine import machine

from tilewise.kernels.isa import run

HEADS = {"10 heads of 64": (10, 10, 64), "32 over 4 of 64": (32, 4, 64), "32 over 8 of 128": (32, 8, 128)}
BLOCK = 64


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def own(heads: int, kv_heads: int, dim: int, texts: int, positions: int) -> tuple[Callable[[], object], int]:
    """A step, and the bytes of keys and values that it reads."""
    blocks = -(-positions // BLOCK)
    draw, rows = np.random.default_rng(0), texts * blocks * BLOCK
    k, v, q = (
        draw.standard_normal((count, width), np.float32).astype(ml_dtypes.bfloat16)
        for count, width in ((rows, kv_heads * dim), (rows, kv_heads * dim), (texts, heads * dim))
    )
    table = draw.permutation(texts * blocks).astype(np.int32).reshape(texts, blocks)
    owner = np.arange(texts, dtype=np.int32)[:, None].copy()
    tiles = [np.empty_like(q), q, k, v, np.full((texts, 1), positions - 1, np.int32), owner, table]
    sizes, floats = [BLOCK, heads, kv_heads, dim, 0], [dim**-0.5, 0.0]
    return lambda: run("attention_paged_bf16", tiles, sizes, floats), 4 * texts * positions * kv_heads * dim


def peer(heads: int, kv_heads: int, dim: int, texts: int, positions: int) -> Callable[[], object]:
    """The same in PyTorch."""
    k, v = (torch.randn(texts, kv_heads, positions, dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    q = torch.randn(texts, heads, 1, dim, dtype=torch.bfloat16)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("numpy", "torch"))
    memory = np.ones(1 << 25)
    for name, sizes in HEADS.items():
        step, num_bytes = own(*sizes, options.texts, options.positions)
        other = peer(*sizes, options.texts, options.positions)
        rows = [
            (seconds_of(step), seconds_of(other), seconds_of(memory.max)) for _ in range(options.rounds + 1)
        ]
        mine, theirs, read = (statistics.median(column) for column in zip(*rows[1:]))
        note = f"{options.texts} texts of {options.positions} positions, {num_bytes / 1e6:.0f} MB"
        limit = memory.nbytes / read / 1e9
        peers = {"torch": num_bytes / theirs / 1e9}
        what = f"attention of a decoding step, bf16, {name}"
        show(Figure(what, num_bytes / mine / 1e9, "GB/s", peers=peers, limit=limit, note=note))


if __name__ == "__main__":
    main()
