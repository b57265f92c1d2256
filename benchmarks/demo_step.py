"""Measures tokens per second and peak memory of a training step, compared with PyTorch.

Models are the demo's and one of GPT-2 small's shape, on one device and on two. PyTorch runs
`transformers`' LlamaForCausalLM of an equal configuration, eager and compiled, in fp32, bf16
autocast and pure bf16, with and without a preloaded library that tells MKL to use AVX-512. Each
mode is a process; rounds visit all modes in turn, and medians are compared. The ceiling is
multiply-adds on registers, measured in the same run. When the time is used up no further turn
begins, but the first round is always complete.

Run: python benchmarks/demo_step.py [--shapes demo gpt2] [--rounds 3] [--minutes 5] [--threads 2] [--without-compile]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
GPT2 = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": 2048,  # of three matrices: as many weights as GPT-2's two of 3072
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
COMPILING_SHARE = 0.5  # of the time; what is left belongs to the rounds
OVERRIDE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


@dataclass(frozen=True)
class Shape:
    """A model, its batch, and its must and goal, in multiples of PyTorch's best by element type."""

    model: dict[str, Any]
    batch: int
    times: dict[str, tuple[float, float]]


SHAPES = {
    "demo": Shape(MODEL, BATCH, {"f32": (1.6, 1.9), "bf16": (2.6, 3.0)}),
    "gpt2": Shape(GPT2, 4, {"f32": (1.7, 1.9), "bf16": (2.5, 3.0)}),
}
TWO_FOR_ONE = (0.95, 0.98)
ALONE, SHARED = "alone", ("dp", "tp")  # on one device, and what two share
MEMORY = {"gpt2": (0.75, 0.65)}  # of PyTorch's
RECOMPUTE = {
    "f32": ["layers.*/silu_gate*"],
    "bf16": "none",
}  # 4% of the memory in f32, and its time is lost in noise


def batch_of(
    step: int, vocab_size: int = MODEL["vocab_size"], batch: int = BATCH
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a step, the same for all."""
    ids = np.random.default_rng(step).integers(0, vocab_size, (batch, CONTEXT + 1), dtype=np.int32)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


# ---- one mode, in a process of its own -------------------------------------------------------------------


def tilewise_step(shape: Shape, dtype: str, layout: str, threads: int) -> Callable[[int], float]:
    """A function that does one step of ours, on one device or on two that share the work, and returns the loss."""
    import tilewise as tw
    from tilewise import models
    from tilewise.models import llama

    graph = tw.ComputeGraph("llama")
    config = llama.LlamaConfig(**shape.model)
    models.build_training_graph(graph, config, shape.batch, CONTEXT, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    mesh = {} if layout == ALONE else {layout: 2}
    workers = threads if layout == ALONE else max(1, threads // 2)
    model = graph.instantiate(graph.plan(mesh, workers_per_device=workers, recompute=RECOMPUTE[dtype]))
    model.initialize(seed=0)

    def step(number: int) -> float:
        tokens, labels = batch_of(number, shape.model["vocab_size"], shape.batch)
        return float(model.step({"tokens": tokens, "labels": labels}, lr=3e-4).loss)

    return step


def torch_step(shape: Shape, precision: str, is_compiled: bool, threads: int) -> Callable[[int], float]:
    """A function that does one step of PyTorch and returns the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = LlamaConfig(**shape.model, rms_norm_eps=1e-5, rope_theta=10000.0, use_cache=False)
    model = LlamaForCausalLM(config).train()
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    forward = torch.compile(model) if is_compiled else model

    def batch(number: int) -> Iterable[np.ndarray]:
        return batch_of(number, shape.model["vocab_size"], shape.batch)

    return step_of_torch(forward, model.parameters, optimizer, batch, precision == "bf16-autocast")


def step_of_torch(
    forward: Callable[..., Any],
    parameters: Callable[[], Iterable[Any]],
    optimizer: Any,
    batch: Callable[[int], Iterable[np.ndarray]],
    uses_autocast: bool = False,
) -> Callable[[int], float]:
    """A function that does one step of a model of transformers and returns the loss. `batch` makes the
    tokens and labels of a step.
    """
    import torch

    def step(number: int) -> float:
        tokens, labels = (torch.from_numpy(a).long() for a in batch(number))
        with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
            logits = forward(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def serve(mode: str, threads: int) -> None:
    """Be one mode: take turns until standard input ends."""
    mode, _, name = mode.partition("@")
    kind, precision, variant, *_ = mode.split(":")
    if kind == "tilewise":
        step = tilewise_step(SHAPES[name], precision, variant, threads)
    else:
        step = torch_step(SHAPES[name], precision, variant == "compile", threads)
    take_turns(step)


def take_turns(step: Callable[[int], float]) -> None:
    """For every line `N` of standard input do N steps, and print a line of JSON: their seconds, the
    last loss, and the process's peak memory in bytes.
    """
    number = 0
    for line in sys.stdin:
        seconds, loss = [], 0.0
        for _ in range(int(line)):
            started = time.perf_counter()
            loss = step(number)
            seconds.append(time.perf_counter() - started)
            number += 1
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "resident": resident}), flush=True)


# ---- all modes, turn by turn -----------------------------------------------------------------------------


Launch = Callable[[list[str]], list[str]]
"""From a command to the one that runs it elsewhere."""


class Contestant:
    """The process of one mode: of this file, or of another with the same protocol."""

    def __init__(
        self,
        mode: str,
        threads: int,
        preload: Path | None,
        script: str = __file__,
        python: str = sys.executable,
        launch: Launch = list,
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
            launch(command),
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
            with contextlib.suppress(BrokenPipeError):  # it has ended by itself, and did not read all
                self._process.stdin.close()
        self._process.terminate()
        self._process.wait()

    @property
    def step_s(self) -> float:
        """Median over all counted steps."""
        return statistics.median(self.seconds)


def modes(name: str, dtype: str, threads: int, with_override: bool) -> Iterator[tuple[str, bool]]:
    """Every mode of an element type that needs no compilation, and whether it gets the override."""
    for layout in (ALONE, *(SHARED if threads > 1 else ())):
        yield f"tilewise:{dtype}:{layout}@{name}", False
    for precision in ("f32",) if dtype == "f32" else ("bf16-autocast", "bf16-pure"):
        yield f"torch:{precision}:eager:stock@{name}", False
        if with_override:
            yield f"torch:{precision}:eager:override@{name}", True


def keep_faster_twins(contestants: list[Contestant]) -> None:
    """Of PyTorch with and without the preloaded library, and of our two devices by two strategies,
    end the slower one: all modes at once would not fit into the memory of a small machine. For that
    reason element types run separately, too.
    """
    twins = {":override": ":stock", f":{SHARED[1]}@": f":{SHARED[0]}@"}
    for name, other in twins.items():
        for one in [c for c in contestants if name in c.mode]:
            twin = next((c for c in contestants if c.mode == one.mode.replace(name, other)), one)
            if twin is one:
                continue
            slower = max(one, twin, key=lambda c: c.last_s)
            print(f"{slower.mode} is slower than its twin, and ends", flush=True)
            slower.close()
            contestants.remove(slower)


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


def flops_per_token(model: dict[str, Any]) -> float:
    """Multiplications and additions of one training token: weights three times, causal attention three
    times."""
    hidden, layers, heads = model["hidden_size"], model["num_hidden_layers"], model["num_attention_heads"]
    kv = hidden * model["num_key_value_heads"] // heads
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * model["intermediate_size"])
    weights += model["vocab_size"] * hidden
    return 6.0 * weights + 3.0 * layers * 2.0 * CONTEXT * hidden


def compete(name: str, dtype: str, options: argparse.Namespace) -> list[Contestant]:
    """Run all modes of an element type in turns; return those that work."""
    started, minutes = time.monotonic(), options.minutes / 2
    with tempfile.TemporaryDirectory() as scratch:
        override = build_override(Path(scratch))
        contestants = []
        for mode, is_preloaded in modes(name, dtype, options.threads, override is not None):
            enter(mode, override if is_preloaded else None, options.threads, contestants)
            keep_faster_twins(contestants)
        for mode, preload in compiled_modes(contestants) if not options.without_compile else ():
            if time.monotonic() - started < minutes * 60 * COMPILING_SHARE:
                enter(mode, preload, options.threads, contestants)
            else:
                print(f"{mode} is left out: compiling it would take too long; raise --minutes", flush=True)
        for number in range(options.rounds):
            for contestant in list(contestants):
                if number and time.monotonic() - started > minutes * 60:
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
    """Start a mode, warm it up (and compile it), alone; add it if it works."""
    contestant = Contestant(mode, threads, preload)
    started = time.monotonic()
    if contestant.take_turn(2, is_counted=False):
        contestants.append(contestant)
        took = time.monotonic() - started
        print(f"ready: {mode:36} after {took:.1f} s (loss {contestant.loss:.4f})", flush=True)


def report(name: str, contestants: list[Contestant], peaks: dict[str, float]) -> None:
    """Every mode, the best of each side and the ratios."""
    shape = SHAPES[name]
    tokens, flops = shape.batch * CONTEXT, flops_per_token(shape.model)
    print(f"{'mode':40} {'tokens/s':>10} {'ms/step':>9} {'of peak':>8}")
    for one in contestants:
        peak = peaks["bf16" if "bf16" in one.mode else "f32"]
        share = tokens / one.step_s * flops / peak
        print(f"{one.mode:40} {tokens / one.step_s:10,.0f} {one.step_s * 1e3:9.1f} {share:8.1%}")
    for precision in ("f32", "bf16"):
        ours, theirs = (
            sorted(
                (c for c in contestants if c.mode.startswith(f"{side}:{precision}")), key=lambda c: c.step_s
            )
            for side in ("tilewise", "torch")
        )
        what, limit = f"{name}, {precision}", peaks[precision] / flops
        if ours:
            peers = {c.mode.partition("@")[0]: tokens / c.step_s for c in theirs[:1]}
            show(
                Figure(what, tokens / ours[0].step_s, "tokens/s", peers=peers, limit=limit, note=ours[0].mode)
            )
        if len(ours) == 2:
            two, one = sorted(ours, key=lambda c: f":{ALONE}@" in c.mode)
            must, goal = TWO_FOR_ONE
            ratio = one.step_s / two.step_s
            show(Figure(f"{what}: two devices for one", ratio, "x", must=must, goal=goal, note=two.mode))
        if ours and theirs:
            must, goal = shape.times[precision]
            ratio = theirs[0].step_s / ours[0].step_s
            show(Figure(f"{what}: times PyTorch's best mode", ratio, "x", must=must, goal=goal))
            alike = [c for c in theirs if "pure" not in c.mode]  # with fp32 parameters, as ours
            alone = [c for c in ours if c.mode.startswith(f"tilewise:{precision}:{ALONE}")]
            if alike and alone:
                least = min(c.answer["resident"] for c in alike)
                resident = alone[0].answer["resident"] / least
                must_be, goal_be = MEMORY.get(name, (None, None))
                memory = f"{what}: peak resident memory of one device, of PyTorch's"
                show(Figure(memory, resident, "x", less_is_better=True, must=must_be, goal=goal_be))


def main() -> None:
    """Parse arguments; be a contestant or run the contest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0, help="of a shape; no turn begins after so long")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--without-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--serve", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        return
    print(f"{machine('numpy', 'torch', 'transformers')}; {options.threads} threads")
    peaks = {dtype: measure_peak(f"peak_{dtype}", options.threads) for dtype in ("f32", "bf16")}
    print("measured peak: " + ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in peaks.items()))
    for name in options.shapes:
        report(name, [one for dtype in peaks for one in compete(name, dtype, options)], peaks)


if __name__ == "__main__":
    main()
