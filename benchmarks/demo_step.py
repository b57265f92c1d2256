"""Tokens per second of the demo's training step, beside PyTorch on the same model, batch and threads.

Claim: at least 1.6 times PyTorch's best mode in fp32, goal 1.9; 2.6 and 3 times in bf16. Each mode is a process of
its own that waits for its turn; rounds visit all modes one after the other, so that a noisy neighbour hits them alike,
and medians are compared. Every figure is printed as it is measured. When the time is used up no further turn begins
(the first round is always whole); after half of it no further mode is compiled (those that are fast in eager mode come
first). The ceiling is measured in the same run: multiply-adds on registers, on all threads.

PyTorch runs `transformers`' LlamaForCausalLM with an equal configuration: eager and compiled; fp32, bf16
autocast (fp32 parameters, as ours) and pure bf16 (no fp32 masters: less work than ours); as it is, and with a
preloaded library that tells MKL to use AVX-512 on processors that are not Intel's.

Run: python benchmarks/demo_step.py [--rounds 3] [--steps 2] [--minutes 5] [--threads 2] [--without-compile]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, show
from machine import machine

BATCH, CONTEXT = 8, 256
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
TIMES_PYTORCH = {"f32": (1.6, 1.9), "bf16": (2.6, 3.0)}  # must and goal
COMPILING_SHARE = 0.5  # of the time; what is left belongs to the rounds
OVERRIDE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def batch_of(
    step: int, vocab_size: int = MODEL["vocab_size"], batch: int = BATCH
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a step, the same for all."""
    ids = np.random.default_rng(step).integers(0, vocab_size, (batch, CONTEXT + 1), dtype=np.int32)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


# ---- one mode, in a process of its own -------------------------------------------------------------------


def tilewise_step(dtype: str, devices: int, threads: int) -> Callable[[int], float]:
    """A function that does one step of ours and returns the loss."""
    import tilewise as tw
    from tilewise import models
    from tilewise.models import llama

    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**MODEL), BATCH, CONTEXT, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    graph.set_distribution(
        tw.DistributionStrategy.ddp(devices) if devices > 1 else tw.DistributionStrategy.single()
    )
    model = graph.instantiate(graph.plan(workers_per_device=max(1, threads // devices)))
    model.initialize(seed=0)

    def step(number: int) -> float:
        tokens, labels = batch_of(number)
        return float(model.step({"tokens": tokens, "labels": labels}, lr=3e-4).loss)

    return step


def torch_step(precision: str, is_compiled: bool, threads: int) -> Callable[[int], float]:
    """A function that does one step of PyTorch and returns the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**MODEL, rms_norm_eps=1e-5, rope_theta=10000.0, use_cache=False)
    ).train()
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    forward = torch.compile(model) if is_compiled else model

    def step(number: int) -> float:
        tokens, labels = (torch.from_numpy(a).long() for a in batch_of(number))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-autocast"):
            logits = forward(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def serve(mode: str, threads: int) -> None:
    """Wait for `N` on standard input, do N steps, answer with their seconds and the last loss as a JSON
    line."""
    kind, precision, variant, *_ = mode.split(":")
    if kind == "tilewise":
        step = tilewise_step(precision, int(variant), threads)
    else:
        step = torch_step(precision, variant == "compile", threads)
    number = 0
    for line in sys.stdin:
        seconds, loss = [], 0.0
        for _ in range(int(line)):
            started = time.perf_counter()
            loss = step(number)
            seconds.append(time.perf_counter() - started)
            number += 1
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


# ---- all modes, turn by turn -----------------------------------------------------------------------------


class Contestant:
    """The process of one mode: of this file, or of another that answers alike."""

    def __init__(
        self,
        mode: str,
        threads: int,
        preload: Path | None,
        script: str = __file__,
        python: str = sys.executable,
    ) -> None:
        self.mode = mode
        self.preload = preload
        self.seconds: list[float] = []
        self.answer: dict[str, Any] = {}
        self.last_s = 0.0
        self.loss = 0.0
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        command = [python, script, "--serve", mode, "--threads", str(threads)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def take_turn(self, num_steps: int, is_counted: bool) -> bool:
        """Do some steps; False, with the reason on standard error, when the process has ended."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{num_steps}\n")
            process.stdin.flush()
            answer = self.answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            self._errors.seek(0)
            reason = self._errors.read().strip().splitlines()[-1:] or [f"exit status {process.wait()}"]
            print(f"{self.mode} is left out: {reason[0]}", file=sys.stderr)
            return False
        if is_counted:
            self.seconds += answer["seconds"]
        self.last_s = min(answer["seconds"])
        self.loss = answer["loss"]
        return True

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()

    @property
    def tokens_per_s(self) -> float:
        """Median over all counted steps."""
        return BATCH * CONTEXT / statistics.median(self.seconds)


def modes(threads: int, with_override: bool) -> Iterator[tuple[str, bool]]:
    """Every mode that needs no compilation, and whether it gets the override."""
    for dtype in ("f32", "bf16"):
        yield f"tilewise:{dtype}:1", False
        if threads > 1:
            yield f"tilewise:{dtype}:2", False
    for precision in ("f32", "bf16-autocast", "bf16-pure"):
        yield f"torch:{precision}:eager:stock", False
        if with_override:
            yield f"torch:{precision}:eager:override", True


def compiled_modes(eager: list[Contestant]) -> Iterator[tuple[str, Path | None]]:
    """The compiled twin of every eager mode of PyTorch, fastest first, and what it preloads."""
    for contestant in sorted((c for c in eager if ":eager:" in c.mode), key=lambda c: c.last_s):
        yield contestant.mode.replace(":eager:", ":compile:"), contestant.preload


def build_override(directory: Path) -> Path | None:
    """The three-line library that tells MKL to use all of the processor; None without a compiler."""
    source, library = directory / "override.c", directory / "override.so"
    source.write_text(OVERRIDE, encoding="utf-8")
    done = subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=False)
    return library if done.returncode == 0 else None


def measure_peak(kernel: str, threads: int) -> float:
    """Operations per second of multiply-adds that never leave the registers, on all threads."""
    from tilewise.kernels.isa import run

    def once(num_steps: int) -> float:
        out = np.zeros((1, 1), np.float32)
        run(kernel, [out], [num_steps])
        return float(out[0, 0])

    num_steps, rates = 20_000_000, []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            per_step = list(pool.map(once, [num_steps] * threads))
            rates.append(sum(per_step) * num_steps / (time.perf_counter() - started))
    return max(rates)


def flops_per_token() -> float:
    """Multiplications and additions of one training token: weights three times, causal attention three
    times."""
    hidden, layers, heads = MODEL["hidden_size"], MODEL["num_hidden_layers"], MODEL["num_attention_heads"]
    kv = hidden * MODEL["num_key_value_heads"] // heads
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * MODEL["intermediate_size"])
    weights += MODEL["vocab_size"] * hidden
    return 6.0 * weights + 3.0 * layers * 2.0 * CONTEXT * hidden


def compete(options: argparse.Namespace) -> list[Contestant]:
    """Run all modes in turns; returns those that could."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        override = build_override(Path(scratch))
        contestants = []
        for mode, is_preloaded in modes(options.threads, override is not None):
            enter(mode, override if is_preloaded else None, options.threads, contestants)
        for mode, preload in compiled_modes(contestants) if not options.without_compile else ():
            if time.monotonic() - started < options.minutes * 60 * COMPILING_SHARE:
                enter(mode, preload, options.threads, contestants)
            else:
                print(f"{mode} is left out: compiling it would take too long; raise --minutes", flush=True)
        for number in range(options.rounds):
            for contestant in list(contestants):
                if number and time.monotonic() - started > options.minutes * 60:
                    continue
                # the first step wakes threads and caches up
                if contestant.take_turn(1, is_counted=False) and contestant.take_turn(options.steps, True):
                    print(
                        f"round {number + 1}: {contestant.mode:36} {contestant.last_s * 1e3:9.1f} ms",
                        flush=True,
                    )
                else:
                    contestants.remove(contestant)
        for contestant in contestants:
            contestant.close()
    return contestants


def enter(mode: str, preload: Path | None, threads: int, contestants: list[Contestant]) -> None:
    """Start a mode, warm it up (and compile it), alone; it takes part when it could."""
    contestant = Contestant(mode, threads, preload)
    started = time.monotonic()
    if contestant.take_turn(2, is_counted=False):
        contestants.append(contestant)
        took = time.monotonic() - started
        print(f"ready: {mode:36} after {took:.1f} s (loss {contestant.loss:.4f})", flush=True)


def report(contestants: list[Contestant], threads: int) -> None:
    """Print the machine, every mode, the best of each side and the ratios."""
    print(f"{machine('numpy', 'torch', 'transformers')}; {threads} threads")
    peaks = {"f32": measure_peak("peak_f32", threads), "bf16": measure_peak("peak_bf16", threads)}
    print("measured peak: " + ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in peaks.items()))
    print(f"{'mode':36} {'tokens/s':>10} {'ms/step':>9} {'of peak':>8}")
    for contestant in contestants:
        peak = peaks["bf16" if "bf16" in contestant.mode else "f32"]
        rate = contestant.tokens_per_s
        share = rate * flops_per_token() / peak
        print(f"{contestant.mode:36} {rate:10,.0f} {BATCH * CONTEXT / rate * 1e3:9.1f} {share:8.1%}")
    for precision in ("f32", "bf16"):
        ours, theirs = (
            max(
                (c for c in contestants if c.mode.startswith(f"{side}:{precision}")),
                key=lambda c: c.tokens_per_s,
                default=None,
            )
            for side in ("tilewise", "torch")
        )
        if ours is not None and theirs is not None:
            must, goal = TIMES_PYTORCH[precision]
            peers = {theirs.mode: theirs.tokens_per_s}
            limit = peaks[precision] / flops_per_token()
            show(Figure(f"{precision}: {ours.mode}", ours.tokens_per_s, "tokens/s", peers=peers, limit=limit))
            ratio = ours.tokens_per_s / theirs.tokens_per_s
            show(Figure(f"{precision}: times PyTorch's best mode", ratio, "x", must=must, goal=goal))


def main() -> None:
    """Parse arguments; be a contestant or run the contest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0, help="no further turn begins after so long")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--without-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--serve", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
    else:
        report(compete(options), options.threads)


if __name__ == "__main__":
    main()
