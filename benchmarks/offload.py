"""Measures a training step whose optimizer state, parameters or activations lie in files.

Compares the step with the larger of the same step in memory and the time in which the disk moves as
many bytes. The model is GPT-2 small, 4 sequences of 256 tokens per microbatch, one device. The
disk's rate is measured in the same rounds and directory: direct reads and writes of 2 MiB, four at
a time. A ratio is the median over the rounds.

Run: python benchmarks/offload.py [--rounds 3] [--microbatches 1 8] [--threads 2] [--dtype f32 bf16] [--directory DIR]
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo_step import CONTEXT, batch_of
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise import models

BATCH, VOCABULARY = 4, 50257
MODEL = {"vocab_size": VOCABULARY, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": CONTEXT}
MUST, GOAL = 1.15, 1.05  # of the optimizer's
KINDS = ("optimizer", "parameters", "activations")
BLOCK, THREADS = 2 << 20, 4


class Disk:
    """A file that is read and written past the page cache."""

    def __init__(self, directory: str, num_bytes: int) -> None:
        self.blocks = max(num_bytes // BLOCK, 2 * THREADS)
        handle, name = tempfile.mkstemp(dir=directory)
        os.posix_fallocate(handle, 0, self.blocks * BLOCK)
        os.close(handle)
        try:
            self.file = os.open(name, os.O_RDWR | os.O_DIRECT)
        finally:
            os.unlink(name)
        self.buffers = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]
        for buffer in self.buffers:
            buffer[:] = os.urandom(BLOCK)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda t: self._move(t, True, True), range(THREADS)))

    def _move(self, thread: int, is_even_written: bool, is_all: bool = False) -> None:
        for block in range(thread, self.blocks, THREADS):
            is_write = is_all or (block // THREADS % 2 == 0) == is_even_written
            call = os.pwritev if is_write else os.preadv
            call(self.file, [self.buffers[thread]], block * BLOCK)

    def bytes_per_second(self, is_even_written: bool) -> float:
        """Of reading and writing together."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda t: self._move(t, is_even_written), range(THREADS)))
        return self.blocks * BLOCK / (time.perf_counter() - begin)


class Mode:
    """A model that steps."""

    def __init__(self, dtype: str, offload: str, microbatches: int, threads: int, directory: str) -> None:
        graph = tw.ComputeGraph("gpt2")
        config = models.config_from_dict({"model_type": "gpt2", **MODEL})
        self.batch = BATCH * microbatches
        models.build_training_graph(graph, config, self.batch, CONTEXT, dtype)
        graph.optimize(tw.optim.AdamW())
        self.plan = graph.plan(
            {},
            accumulation=microbatches,
            batch_splits=self.batch,
            offload=offload,
            workers_per_device=threads,
        )
        self.model = graph.instantiate(self.plan, offload_directory=directory)
        self.model.initialize(seed=0)
        self.number = 0

    def step(self) -> tuple[float, int]:
        """Seconds of one step, and bytes that it moved."""
        tokens, labels = batch_of(self.number, VOCABULARY, self.batch)
        self.number += 1
        before, begin = self.model.file_traffic(), time.perf_counter()
        self.model.step({"tokens": tokens, "labels": labels}, lr=3e-4)
        seconds, after = time.perf_counter() - begin, self.model.file_traffic()
        return seconds, sum(after[k] - before[k] for k in ("bytes_read", "bytes_written"))


def compare(dtype: str, microbatches: int, threads: int, rounds: int, directory: str) -> None:
    """One table: all kinds compared with no offloading."""
    kinds = KINDS if microbatches == 1 else KINDS[:1]
    modes = {kind: Mode(dtype, kind, microbatches, threads, directory) for kind in ("none", *kinds)}
    disk = Disk(directory, 1 << 30)
    for mode in modes.values():
        mode.step()
    seconds: dict[str, list[float]] = {kind: [] for kind in modes}
    moved: dict[str, int] = {}
    rates = []
    for turn in range(rounds):
        rates.append(disk.bytes_per_second(turn % 2 == 0))
        for kind, mode in modes.items():
            taken, moved[kind] = mode.step()
            seconds[kind].append(taken)
    rate = statistics.median(rates)
    print(f"{dtype}, {microbatches} microbatches: disk {rate / 2**30:.2f} GiB/s")
    print(f"  nothing in a file {statistics.median(seconds['none']):7.2f} s")
    for kind in kinds:
        bounds = [max(plain, moved[kind] / r) for plain, r in zip(seconds["none"], rates)]
        ratio = statistics.median([taken / bound for taken, bound in zip(seconds[kind], bounds)])
        usage, plain = (modes[k].plan.estimate_memory_usage()[0] for k in (kind, "none"))
        must, goal = (MUST, GOAL) if kind == "optimizer" else (None, None)
        what = f"{dtype}, {microbatches} microbatches, {kind} in a file, against its bound"
        note = (
            f"{statistics.median(seconds[kind]):.2f} s, {moved[kind] / 2**30:.2f} GiB moved, bound "
            f"{statistics.median(bounds):.2f} s; memory {usage['total'] / plain['total']:.2f} of "
            f"{plain['total'] / 2**30:.2f} GiB"
        )
        show(Figure(what, ratio, "x", less_is_better=True, must=must, goal=goal, limit=1.0, note=note))
    for mode in modes.values():
        mode.model.close()


def main() -> None:
    """Run the requested comparisons."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    where = Path(args.directory).resolve()
    print(f"{machine()}; {args.threads} threads, files in {where}")
    for dtype in args.dtype:
        for microbatches in args.microbatches:
            compare(dtype, microbatches, args.threads, args.rounds, args.directory)


if __name__ == "__main__":
    main()
