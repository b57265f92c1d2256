"""Measures an engine: makes requests, records times, and computes the figures that vLLM's benchmarks print.

Times are taken on the engine's thread when a token is reported, so they do not include delays of readers.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tilewise.core import Validator
from tilewise.core.validation import shown
from tilewise.serve.engine import Engine, Prompt
from tilewise.serve.outputs import Delta
from tilewise.serve.sampling_params import SamplingParams

__all__ = [
    "PERCENTILES",
    "Times",
    "latency_figures",
    "measure",
    "random_prompts",
    "read_prompts",
    "throughput_figures",
]

PERCENTILES = (10, 25, 50, 75, 90, 99)
_validate = Validator("serve")


@dataclass
class Times:
    """Times of one request, in seconds of `time.perf_counter`.

    Attributes:
        num_prompt: number of tokens of its prompt.
        submitted: when the request was submitted.
        texts: when each token was reported, for each of its texts.
        ended: when its last text ended.
    """

    num_prompt: int
    submitted: float
    texts: list[list[float]] = field(default_factory=list)
    ended: float = 0.0


def random_prompts(
    count: int, length: int, vocab_size: int, seed: int, prefix_length: int = 0
) -> list[list[int]]:
    """Prompts of uniformly random tokens.

    Args:
        count: number of prompts.
        length: number of random tokens of each prompt.
        vocab_size: size of the vocabulary.
        seed: seed of the random numbers.
        prefix_length: number of random tokens that all prompts share, before the others.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(prefix_length)]
    return [prefix + [rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def read_prompts(text: str, count: int) -> list[tuple[str, int | None]]:
    """Prompts of a data set, each with its number of new tokens, or None if the data set does not
    say.

    Reads lines of JSON with `prompt` and optionally `output_len`, or a ShareGPT file, of whose conversations the first
    messages are the prompts.

    Args:
        text: content of the file.
        count: largest number of prompts.

    Raises:
        ConfigError: the text has neither form, or contains no prompt.
    """
    try:
        is_list = text.lstrip().startswith("[")
        entries = (
            json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (ValueError, RecursionError) as error:
        _validate.invalid("bench", "a data set must be JSON, or lines of JSON", str(error), "correct it")
    requests: list[tuple[str, int | None]] = []
    prompt: Any
    for number, entry in enumerate(entries, 1):
        if len(requests) == count:
            break
        fields = _validate.mapping("bench", f"prompt {number}", entry, "fields")
        if "conversations" in fields:
            talk = _validate.sequence(
                "bench", f"conversations of prompt {number}", fields["conversations"], "messages"
            )
            prompt = talk[0].get("value") if talk and isinstance(talk[0], dict) else None
            if prompt is None:
                continue  # ShareGPT files have empty conversations
        else:
            prompt = fields.get("prompt")
        prompt = _validate.instance("bench", f"prompt {number}", prompt, str, "pass text")
        num_new = fields.get("output_len")
        if num_new is not None:
            _validate.integer("bench", f"output_len of prompt {number}", num_new, 1, 1 << 20)
        requests.append((prompt, num_new))
    if not requests:
        _validate.invalid("bench", "a data set must have a prompt", shown(text, 40), "pass another one")
    return requests


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    on_end: Callable[[], object] = lambda: None,
) -> list[Times]:
    """Submit all requests at once, and wait until all have ended.

    Args:
        engine: the engine.
        prompts: prompts to continue.
        params: settings for all prompts, or one for each.
        on_end: called when a request has ended, on the caller's thread.

    Raises:
        ConfigError: a prompt or setting is invalid, or a prompt is too long; before any work.
        TaskFailed, NotFinite: a request's step failed.
    """
    requests = engine.requests(prompts, params)
    submitted_s = time.perf_counter()
    times = [Times(len(r.ids), submitted_s, [[] for _ in range(r.sampling.n)]) for r in requests]
    num_open = [request.sampling.n for request in requests]
    errors: list[BaseException] = []
    changed = threading.Semaphore(0)

    def notify(number: int, event: Delta | BaseException) -> None:
        now = time.perf_counter()
        if isinstance(event, BaseException):
            errors.append(event)
            num_open[number] = 0
        else:
            if event.token is not None:
                times[number].texts[event.choice].append(now)
            num_open[number] -= event.finish_reason is not None
        if num_open[number] == 0:
            times[number].ended = now
            changed.release()

    for number, request in enumerate(requests):
        engine.submit([request], partial(notify, number))
    for _ in requests:
        changed.acquire()
        on_end()
    if errors:
        raise errors[0]
    return times


def latency_figures(rounds: Sequence[Sequence[Times]]) -> dict[str, Any]:
    """The figures of `vllm bench latency` (seconds per round), and milliseconds per token.

    Args:
        rounds: times of the requests of each round.
    """
    latencies = [max(one.ended for one in batch) - batch[0].submitted for batch in rounds]
    flat = [one for batch in rounds for one in batch]
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": _percentiles(latencies),
        **_token_figures(flat),
    }


def throughput_figures(times: Sequence[Times]) -> dict[str, Any]:
    """The figures of `vllm bench throughput`, and milliseconds per token.

    Args:
        times: times of all requests.
    """
    elapsed = max(one.ended for one in times) - min(one.submitted for one in times)
    num_prompt, num_new = (
        sum(one.num_prompt for one in times),
        sum(len(text) for one in times for text in one.texts),
    )
    return {
        "elapsed_time": elapsed,
        "num_requests": len(times),
        "total_num_tokens": num_prompt + num_new,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_new,
        "requests_per_second": len(times) / elapsed,
        "tokens_per_second": (num_prompt + num_new) / elapsed,
        "output_tokens_per_second": num_new / elapsed,
        **_token_figures(times),
    }


def _token_figures(times: Sequence[Times]) -> dict[str, Any]:
    """Milliseconds to the first token, and between tokens."""
    first = [1e3 * (text[0] - one.submitted) for one in times for text in one.texts if text]
    between = [1e3 * gap for one in times for text in one.texts for gap in np.diff(text).tolist()]
    return {
        name: {"mean": float(np.mean(values)), "percentiles": _percentiles(values)}
        for name, values in (("ttft_ms", first), ("itl_ms", between))
        if values
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {str(rank): float(np.percentile(values, rank)) for rank in PERCENTILES}
