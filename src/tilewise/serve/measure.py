"""How quickly an engine answers: requests made for measuring, their times, the figures that vLLM's benchmarks print.

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

from tilewise.core import Border
from tilewise.core.border import shown
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
_border = Border("serve")


@dataclass
class Times:
    """Of one request; seconds of `time.perf_counter`.

    Attributes:
        num_prompt: tokens of its prompt.
        asked: when the request was made.
        texts: when each token was reported, for each of its texts.
        ended: when its last text had ended.
    """

    num_prompt: int
    asked: float
    texts: list[list[float]] = field(default_factory=list)
    ended: float = 0.0


def random_prompts(
    count: int, length: int, vocab_size: int, seed: int, prefix_length: int = 0
) -> list[list[int]]:
    """Prompts of tokens drawn evenly.

    Args:
        count: prompts.
        length: tokens of each.
        vocab_size: tokens to draw from.
        seed: of the draws.
        prefix_length: tokens before these that all have in common.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(prefix_length)]
    return [prefix + [rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def read_prompts(text: str, count: int) -> list[tuple[str, int | None]]:
    """Prompts of a file, each with its number of new tokens where the file says one.

    Takes a line of JSON per prompt (`prompt`, perhaps `output_len`), or one list as ShareGPT's files are: of each
    conversation the first message.

    Args:
        text: of the file.
        count: at most so many.

    Raises:
        ConfigError: it is none of these, or has no prompt.
    """
    try:
        is_list = text.lstrip().startswith("[")
        entries = (
            json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (ValueError, RecursionError) as error:
        _border.refuse("bench", "a data set must be JSON, or lines of JSON", str(error), "correct it")
    found: list[tuple[str, int | None]] = []
    prompt: Any
    for number, entry in enumerate(entries, 1):
        if len(found) == count:
            break
        given = _border.mapping("bench", f"prompt {number}", entry, "fields")
        if "conversations" in given:
            talk = _border.sequence(
                "bench", f"conversations of prompt {number}", given["conversations"], "messages"
            )
            prompt = talk[0].get("value") if talk and isinstance(talk[0], dict) else None
            if prompt is None:
                continue  # ShareGPT's files hold empty ones
        else:
            prompt = given.get("prompt")
        prompt = _border.instance("bench", f"prompt {number}", prompt, str, "pass text")
        wanted = given.get("output_len")
        if wanted is not None:
            _border.integer("bench", f"output_len of prompt {number}", wanted, 1, 1 << 20)
        found.append((prompt, wanted))
    if not found:
        _border.refuse("bench", "a data set must hold a prompt", shown(text, 40), "pass another")
    return found


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    on_end: Callable[[], object] = lambda: None,
) -> list[Times]:
    """Ask for all at once, and wait for all.

    Args:
        engine: that answers.
        prompts: to continue.
        params: how, for all or one for each.
        on_end: called when a request has ended.

    Raises:
        ConfigError: a prompt or setting that is none, or too long a prompt; before any work.
        TaskFailed, NotFinite: a request's step failed.
    """
    requests = engine.requests(prompts, params)
    asked = time.perf_counter()
    times = [Times(len(r.ids), asked, [[] for _ in range(r.sampling.n)]) for r in requests]
    left = [request.sampling.n for request in requests]
    errors: list[BaseException] = []
    changed = threading.Semaphore(0)

    def notify(number: int, event: Delta | BaseException) -> None:
        now = time.perf_counter()
        if isinstance(event, BaseException):
            errors.append(event)
            left[number] = 0
        else:
            if event.token is not None:
                times[number].texts[event.choice].append(now)
            left[number] -= event.finish_reason is not None
        if left[number] == 0:
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
    """What `vllm bench latency` writes, seconds per round, and what each token took besides.

    Args:
        rounds: the requests of each.
    """
    whole = [max(one.ended for one in batch) - batch[0].asked for batch in rounds]
    flat = [one for batch in rounds for one in batch]
    return {
        "avg_latency": float(np.mean(whole)),
        "latencies": whole,
        "percentiles": _percentiles(whole),
        **_of_tokens(flat),
    }


def throughput_figures(times: Sequence[Times]) -> dict[str, Any]:
    """What `vllm bench throughput` writes, and what each token took besides.

    Args:
        times: of all requests.
    """
    elapsed = max(one.ended for one in times) - min(one.asked for one in times)
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
        **_of_tokens(times),
    }


def _of_tokens(times: Sequence[Times]) -> dict[str, Any]:
    """Milliseconds to the first token, and between two."""
    first = [1e3 * (text[0] - one.asked) for one in times for text in one.texts if text]
    between = [1e3 * gap for one in times for text in one.texts for gap in np.diff(text).tolist()]
    return {
        name: {"mean": float(np.mean(values)), "percentiles": _percentiles(values)}
        for name, values in (("ttft_ms", first), ("itl_ms", between))
        if values
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {str(rank): float(np.percentile(values, rank)) for rank in PERCENTILES}
