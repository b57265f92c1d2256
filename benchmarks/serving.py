"""Measures the serving engine in one process.

- scheduling: `LLM.generate` with mixed lengths, compared with replaying the same model calls
  without a scheduler.
- first-token: time to the first token with 1,024 of 1,025 prompt tokens in the prefix cache,
  compared with none.
- offline: output tokens per second for 64 prompts of 128 tokens and 128 new ones, compared with
  `transformers`' continuous batching, and with vLLM where `--vllm-python` names a Python that has
  it (`peers/vllm_turns.py`).

Models have random bf16 weights, of TinyLlama-1.1B's shape or 100M parameters. Sides take turns; a
figure is the median over the rounds.

Run: python benchmarks/serving.py [--only scheduling first-token offline] [--models 100m tinyllama] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from decoding import MODELS
from demo_step import Contestant
from figures import Figure, show
from machine import machine

from tilewise.checkpoint import save_pretrained
from tilewise.data import load_standard_library, train_tokenizer
from tilewise.models.llama import LlamaConfig
from tilewise.serve import LLM, SamplingParams
from tilewise.serve.measure import measure, random_prompts

CONTEXT = 2048
FIGURES = ("scheduling", "first-token", "offline")
SCHEDULING, FIRST_TOKEN, OFFLINE = (0.92, 0.97), (0.1, 0.04), (1.5, 2.5)  # must and goal
MIXED = {"100m": 96, "tinyllama": 16}  # prompts, each of 16 to 256 tokens, with 16 to 128 new ones
LONG_PROMPT = 1025
PROMPTS, PROMPT, NEW = 64, 128, 128
FEW = 4  # prompts of a turn that warms up

Turn = Callable[[list[list[int]]], float]
"""Answers prompts; says how many seconds that took."""


def make_folder(folder: Path, name: str) -> Path:
    """A model directory without weights."""
    tokenizer = train_tokenizer((file.text for file in load_standard_library().train), 32000)
    config = LlamaConfig(**{**MODELS[name], "max_position_embeddings": CONTEXT})
    save_pretrained(folder / name, {**config.to_dict(), "dtype": "bfloat16"}, (), tokenizer)
    return folder / name


def open_llm(folder: str | Path, **settings: Any) -> LLM:
    """Ours, with random weights."""
    return LLM(folder, load_format="dummy", dtype="bf16", **settings)


def show_ratio(name: str, value: float, bars: tuple[float, float], note: str = "") -> None:
    """A ratio with its must and its goal, of which the goal is the harder."""
    must, goal = bars
    show(Figure(name, value, "x", less_is_better=goal < must, must=must, goal=goal, note=note))


# ---- the same calls without a scheduler ------------------------------------------------------------------


def mixed(name: str, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and settings of many lengths."""
    drawn = random.Random(0)
    prompts = [
        random_prompts(1, drawn.randint(16, 256), vocab_size, number)[0] for number in range(MIXED[name])
    ]
    lengths = [drawn.randint(16, 128) for _ in prompts]
    return prompts, [
        SamplingParams(max_tokens=length, ignore_eos=True, seed=number)
        for number, length in enumerate(lengths)
    ]


def calls_of(llm: LLM, generate: Callable[[], object]) -> list[dict[str, Any]]:
    """The inputs of every call of the model during this work."""
    instance, calls = llm.engine.model.instance, []
    forward = instance.forward

    def record_inputs(*args: Any, **inputs: Any) -> None:
        calls.append({name: np.array(value) for name, value in inputs.items()})
        forward(*args, **inputs)

    instance.forward = record_inputs  # type: ignore[method-assign]
    try:
        generate()
    finally:
        instance.forward = forward  # type: ignore[method-assign]
    return calls


def measure_scheduling(name: str, folder: Path, options: argparse.Namespace) -> None:
    """`LLM.generate`, and its calls alone."""
    with open_llm(folder, max_num_seqs=MIXED[name] * 2 // 3) as llm:
        prompts, params = mixed(name, llm.engine.model.config.vocab_size)
        instance, number = llm.engine.model.instance, 0

        def generate() -> None:
            nonlocal number
            number += 1  # so that no prompt is found in the cache
            llm.generate([{"prompt_token_ids": ids, "cache_salt": str(number)} for ids in prompts], params)

        calls = calls_of(llm, generate)

        def replay() -> None:
            for inputs in calls:
                instance.forward(**inputs)

        replay()
        rows = []
        for _ in range(options.rounds):
            rows.append((seconds_of(generate), seconds_of(replay)))
    tokens = sum(way.max_tokens or 0 for way in params)
    ratio = statistics.median(alone / whole for whole, alone in rows)
    whole = statistics.median(row[0] for row in rows)
    note = f"{len(prompts)} prompts, {tokens} new tokens, {len(calls)} calls"
    between = statistics.median(whole - alone for whole, alone in rows) / len(calls) * 1e3
    show(Figure(f"{name}, bf16: LLM.generate, mixed lengths", tokens / whole, "tokens/s", note=note))
    show(Figure(f"{name}, bf16: between two calls", between, "ms", less_is_better=True))
    show_ratio(f"{name}, bf16: of the speed without a scheduler", ratio, SCHEDULING)


def seconds_of(run: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# ---- first tokens ----------------------------------------------------------------------------------------


def measure_first_token(name: str, folder: Path, options: argparse.Namespace) -> None:
    """A long prompt, and the same again."""
    rows = []
    with open_llm(folder) as llm:
        vocab_size = llm.engine.model.config.vocab_size
        for number in range(options.rounds + 1):  # the first warms up
            (prompt,) = random_prompts(1, LONG_PROMPT, vocab_size, number)
            rows.append([first_token_s(llm, prompt) for _ in range(3)])
            (again,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
            assert again.num_cached_tokens == LONG_PROMPT - 1
    rows = rows[1:]
    ratio = statistics.median(min(cached) / whole for whole, *cached in rows)
    whole, cached = (
        statistics.median(column) for column in [[r[0] for r in rows], [min(r[1:]) for r in rows]]
    )
    for what, seconds in (("uncached", whole), ("cached", cached)):
        title = f"{name}, bf16: first token of {LONG_PROMPT}, {what}"
        show(Figure(title, seconds * 1e3, "ms", less_is_better=True))
    show_ratio(f"{name}, bf16: first token, cached by uncached", ratio, FIRST_TOKEN)


def first_token_s(llm: LLM, prompt: list[int]) -> float:
    """Seconds from the request to the first token."""
    (times,) = measure(llm.engine, [prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return times.texts[0][0] - times.submitted


# ---- offline throughput ----------------------------------------------------------------------------------


def tilewise_offline(asked: dict[str, Any]) -> Turn:
    """Ours."""
    llm = open_llm(asked["folder"], max_context=asked["prompt"] + asked["new"])
    params = SamplingParams(max_tokens=asked["new"], temperature=0, ignore_eos=True)

    def turn(prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        assert all(len(output.outputs[0].token_ids) == asked["new"] for output in outputs)
        return seconds

    return turn


def transformers_offline(asked: dict[str, Any]) -> Turn:
    """`generate_batch`, eight requests at a time: SDPA computes every token with the keys of all requests of a batch,
    so 16 were slower by a tenth, 32 by a quarter, and 4 no faster.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = AutoConfig.from_pretrained(asked["folder"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    way = GenerationConfig(max_new_tokens=asked["new"], do_sample=False, eos_token_id=-1, pad_token_id=0)
    page, together = 32, 8
    pages = -(-(asked["prompt"] + asked["new"]) // page) * asked["prompts"] + 64
    batching = ContinuousBatchingConfig(
        page_size=page, num_blocks=pages, max_batch_tokens=128, max_requests_per_batch=together
    )

    def turn(prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=way, continuous_batching_config=batching)
        seconds = time.perf_counter() - started
        assert all(len(one.generated_tokens) == asked["new"] for one in answers.values())
        return seconds

    return turn


def serve(asked: dict[str, Any]) -> None:
    """A side of the comparison: each line of standard input is a turn, and the number of its prompts."""
    turn = tilewise_offline(asked) if asked["side"] == "tilewise" else transformers_offline(asked)
    for number, line in enumerate(sys.stdin):  # no prompt comes twice
        prompts = random_prompts(int(line), asked["prompt"], asked["vocab"], number)
        print(json.dumps({"seconds": [turn(prompts)], "loss": 0.0}), flush=True)


def measure_offline(name: str, folder: Path, options: argparse.Namespace) -> None:
    """All sides in turns."""
    asked = {
        "folder": str(folder),
        "prompts": options.prompts,
        "prompt": PROMPT,
        "new": NEW,
        "vocab": MODELS[name]["vocab_size"],
    }
    threads = len(os.sched_getaffinity(0))
    peers = [("transformers", sys.executable, __file__)] if find_spec("transformers") else []
    if options.vllm_python is not None:
        script = Path(__file__).parent / "peers" / "vllm_turns.py"
        peers.append(("vllm", str(options.vllm_python), str(script)))
    sides = {
        side: Contestant(json.dumps({**asked, "side": side}), threads, None, script, python)
        for side, python, script in [("tilewise", sys.executable, __file__), *peers]
    }
    for side, contestant in list(sides.items()):
        started = time.monotonic()
        if contestant.take_turn(FEW, is_counted=False):
            print(f"  {side:12} ready after {time.monotonic() - started:.1f} s", flush=True)
        else:
            contestant.close()
            del sides[side]
    ends_at = time.monotonic() + options.minutes * 60
    for number in range(options.rounds):
        for contestant in sides.values():
            if not number or time.monotonic() + contestant.last_s < ends_at:
                contestant.take_turn(asked["prompts"], is_counted=True)
    tokens = asked["prompts"] * asked["new"]
    rates = {side: tokens / statistics.median(one.seconds) for side, one in sides.items()}
    turns = ", ".join(f"{side} {len(one.seconds)}" for side, one in sides.items())
    for contestant in sides.values():
        contestant.close()
    own, note = rates.pop("tilewise"), f"{asked['prompts']} prompts; turns {turns}"
    show(Figure(f"{name}, bf16: offline throughput", own, "tokens/s", peers=rates, note=note))
    for side, rate in rates.items():
        show_ratio(f"{name}, bf16: offline throughput, times {side}", own / rate, OFFLINE)


# ---- all -------------------------------------------------------------------------------------------------

MEASURED: dict[str, Callable[[str, Path, argparse.Namespace], None]] = {
    "scheduling": measure_scheduling,
    "first-token": measure_first_token,
    "offline": measure_offline,
}


def main() -> None:
    """Parse arguments; be a side, or run the requested measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=FIGURES)
    parser.add_argument("--models", nargs="+", choices=MIXED, default=["100m"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=2.5, help="offline: no further turn after so long")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of offline")
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM")
    parser.add_argument("--serve", type=json.loads, metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    print(machine("numpy", "torch", "transformers"))
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            model = make_folder(Path(folder), name)
            for figure in options.only:
                MEASURED[figure](name, model, options)


if __name__ == "__main__":
    main()
