"""Measures the time between two calls of the model in the serving engine, while the devices wait.

Runs 64 greedy sequences on a model of 100M random parameters with a vocabulary of 32,000. A figure
is the median over the steps in which all sequences decode; each function is also timed without the
functions that it calls.

Run: python benchmarks/engine_gap.py [--sequences 64] [--tokens 48] [--rounds 5] [--devices 1] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from decoding import MODELS
from figures import Figure, show
from machine import machine
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from tilewise import Engine, SamplingParams
from tilewise.generate import sampling
from tilewise.models.llama import LlamaConfig
from tilewise.serve import runner

MUST_MS, GOAL_MS, PROMPT = 1.0, 0.3, 16


def made_up_tokenizer(size: int) -> Tokenizer:
    """Bytes and words of two to four letters."""
    words = ("".join(w) for n in (1, 2, 3, 4) for w in itertools.product("etaoinshrdlu", repeat=n))
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {f"▁{word}": 256 + place for place, word in enumerate(itertools.islice(words, size - 256))}
    tokenizer = Tokenizer(BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


class Clock:
    """Time by part on one thread, each without the parts that it calls; between two forwards only."""

    def __init__(self) -> None:
        self.gaps: list[tuple[int, float, dict[str, float]]] = []
        self._parts: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        self._ended = 0.0
        self._is_running = False
        self._count = 0

    def part(self, owner: Any, name: str, label: str) -> None:
        """Time a function of an object or module."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                taken = time.perf_counter() - started
                self._parts[label] += taken - self._inside.pop()
                if self._inside:
                    self._inside[-1] += taken

        setattr(owner, name, timed)

    def forward(self, run: Callable[..., None], count: Callable[[], int]) -> Callable[..., None]:
        """Record the start and end of the native call as the gap's ends."""

        def timed(*args: Any, **named: Any) -> None:
            started = time.perf_counter()
            if self._ended and count() == self._count:
                self.gaps.append((self._count, started - self._ended, dict(self._parts)))
            run(*args, **named)
            self._parts.clear()
            self._count = count()
            self._ended = time.perf_counter()
            if self._inside:
                self._inside[-1] += self._ended - started

        return timed


class _Executor:
    """The native executor with a timed `run`."""

    def __init__(self, executor: Any, run: Callable[..., None]) -> None:
        self._executor, self.run = executor, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def watch(engine: Engine) -> Clock:
    """Put the clock into an engine."""
    clock = Clock()
    replica = engine._replicas[0]
    core, instance = replica._core, replica.model.instance
    executor = instance._executor
    instance._executor = _Executor(executor, clock.forward(executor.run, lambda: core.scheduler.num_running))
    for owner, name, label in (
        (core.scheduler, "schedule", "scheduling"),
        (core.scheduler, "complete", "scheduling"),
        (runner, "call_inputs", "inputs"),
        (instance._tensors, "feed", "checking and writing inputs"),
        (instance._tensors, "view", "finding logits"),
        (core, "_take", "taking tokens"),
        (runner.Runner, "run", "around the call"),
        (core, "_goes_on", "looking at tokens"),
        (core, "step", "stepping"),
        (sampling, "sample_tokens", "sampling tokens"),
    ):
        clock.part(owner, name, label)
    return clock


def ask(engine: Engine, count: int, tokens: int, vocab: int) -> None:
    """Submit so many greedy texts, and wait for them."""
    left, done = count, threading.Event()

    def tell(event: Any) -> None:
        nonlocal left
        if isinstance(event, BaseException):
            raise event
        left -= event.finish_reason is not None
        if not left:
            done.set()

    prompts = np.random.default_rng(0).integers(256, vocab, (count, PROMPT)).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.submit(engine.requests(prompts, params), tell)
    done.wait()


def main() -> None:
    """One line for the gap, and one per part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    options = parser.parse_args()
    shape = MODELS["100m"]
    vocab = shape["vocab_size"]
    with tempfile.TemporaryDirectory() as directory:
        config = LlamaConfig(**shape, eos_token_ids=(0,))
        Path(directory, "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
        made_up_tokenizer(vocab).save(str(Path(directory, "tokenizer.json")))
        engine = Engine(
            directory,
            load_format="dummy",
            dtype=options.dtype,
            max_num_seqs=options.sequences,
            max_num_batched_tokens=max(256, options.sequences),
            max_context=256,
            tensor_parallel_size=options.devices,
        )
        with engine:
            clock = watch(engine)
            for _ in range(options.rounds):
                ask(engine, options.sequences, options.tokens, vocab)
    full = [gap for gap in clock.gaps if gap[0] == options.sequences]
    gaps = [seconds * 1e3 for _, seconds, _ in full]
    gap = statistics.median(gaps)
    tenth, ninetieth = np.percentile(gaps, [10, 90])
    print(f"{machine()}; {options.devices} device(s), {options.dtype}, {len(gaps)} gaps")
    note = f"a tenth below {tenth:.3f}, a tenth above {ninetieth:.3f}"
    what = f"{options.sequences} sequences: between two forwards"
    show(Figure(what, gap, "ms", less_is_better=True, must=MUST_MS, goal=GOAL_MS, note=note))
    for part in sorted({name for _, _, parts in full for name in parts}):
        print(f"  {part:32} {statistics.median(p.get(part, 0.0) for _, _, p in full) * 1e3:7.3f} ms")
    rest = statistics.median(s - sum(p.values()) for _, s, p in full)
    print(f"  {'everything else':32} {rest * 1e3:7.3f} ms")


if __name__ == "__main__":
    main()
