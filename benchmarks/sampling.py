"""Measures sampling tokens from rows of logits, compared with transformers.

The peer is transformers' logits warpers with torch.multinomial on as many threads. Logits are
normally distributed; a figure is the median of rounds that take turns.

Run: python benchmarks/sampling.py [--rows 64] [--vocab 32000] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from figures import Figure, show
from machine import machine
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tilewise.kernels.sampling import sample_tokens

WAYS: dict[str, tuple[float, int, float]] = {  # temperature, top_k, top_p
    "likeliest": (0.0, 0, 1.0),
    "temperature": (1.0, 0, 1.0),
    "top_p": (0.8, 0, 0.95),
    "top_k": (0.7, 40, 1.0),
}


def peer(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Tokens as `generate` of transformers samples them."""
    if temperature == 0:
        return logits.argmax(-1)
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    scores = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits)
    return torch.multinomial(torch.softmax(scores, -1), 1)


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Time both, a line per setting."""
    parser = argparse.ArgumentParser(description="Sampling tokens, compared with transformers.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    print(f"{machine('torch', 'transformers')}; {threads} threads; {options.rows} rows of {options.vocab:,}")
    logits = np.random.default_rng(0).normal(0, 2, (options.rows, options.vocab)).astype(np.float32)
    rows, theirs = np.arange(options.rows), torch.from_numpy(logits)
    keys = np.array([(seed, 1, 0) for seed in range(options.rows)], np.uint64)
    for name, (temperature, top_k, top_p) in WAYS.items():
        settings = np.array([(temperature, top_k, top_p, 0, 1)] * options.rows, np.float64)
        calls: dict[str, Callable[[], object]] = {
            "one thread": lambda s=settings: sample_tokens(logits, rows, s, keys, 1),  # type: ignore[misc]
            "all threads": lambda s=settings: sample_tokens(logits, rows, s, keys, threads),  # type: ignore[misc]
            "transformers": lambda w=(temperature, top_k, top_p): peer(theirs, *w),  # type: ignore[misc]
        }
        taken: dict[str, list[float]] = {label: [] for label in calls}
        for _ in range(options.rounds):
            for label, call in calls.items():
                taken[label].append(seconds(call))
        medians = {label: statistics.median(times) / options.rows * 1e6 for label, times in taken.items()}
        peers = {"transformers": medians["transformers"]}
        for label in ("one thread", "all threads"):
            show(Figure(f"{name}, {label}, a row", medians[label], "us", less_is_better=True, peers=peers))


if __name__ == "__main__":
    main()
