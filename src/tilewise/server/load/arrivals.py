"""Sends requests at a rate, or as fast as they are answered, and records the times of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tilewise.server.load.target import BadAnswer, Target

__all__ = ["Load", "LoadRequest", "LoadResult", "play"]


@dataclass(frozen=True)
class LoadRequest:
    """A request.

    Attributes:
        prompt: text or token ids of the prompt.
        num_prompt: number of the prompt's tokens, or 0 if unknown. The count that the server
            reports takes precedence.
        num_new: number of tokens to generate.
    """

    prompt: str | list[int]
    num_prompt: int
    num_new: int


@dataclass
class LoadResult:
    """The times and the answer of a request. Times are in seconds of `time.perf_counter`.

    Attributes:
        num_prompt: tokens of the prompt.
        submitted: when the request was sent.
        delta_times: when each delta of the text arrived.
        num_new: number of tokens of the text.
        ended: when the answer was complete.
        error: why the request failed; empty if it succeeded.
    """

    num_prompt: int
    submitted: float = 0.0
    delta_times: list[float] = field(default_factory=list)
    num_new: int = 0
    ended: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Load:
    """The rate and the settings of requests.

    Attributes:
        endpoint: `/v1/completions` or `/v1/chat/completions`.
        model: name of the model.
        request_rate: average number of requests per second; infinite to send all at once.
        burstiness: how requests arrive. 1 is a Poisson process; smaller values are burstier, larger
            values more even.
        max_concurrency: maximum number of requests at a time; None for no limit.
        ignore_eos: whether texts are generated to their full length, past end tokens.
        temperature: temperature of sampling.
        seed: seed of arrivals and of sampling.
    """

    endpoint: str
    model: str
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0

    def waits(self, count: int) -> Iterator[float]:
        """Seconds to wait before each request: random numbers from the seed, scaled so that their
        sum gives the rate.
        """
        if self.request_rate == float("inf"):
            yield from [0.0] * count
            return
        rng = random.Random(self.seed)
        waits = [rng.gammavariate(self.burstiness, 1.0) for _ in range(count - 1)]
        scale = (count - 1) / self.request_rate / (sum(waits) or 1.0)
        yield 0.0
        yield from (wait * scale for wait in waits)

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """The body of a request."""
        body: dict[str, Any] = {"prompt": request.prompt}
        if self.endpoint.endswith("/chat/completions"):
            body = {"messages": [{"role": "user", "content": request.prompt}]}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {
            **body,
            "model": self.model,
            "max_tokens": request.num_new,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def play(
    target: Target, load: Load, requests: Sequence[LoadRequest], on_end: Callable[[], object] = lambda: None
) -> list[LoadResult]:
    """Send all requests and wait for all answers. Errors are recorded in the results.

    Args:
        target: the server.
        load: rate and settings of the requests.
        requests: the requests.
        on_end: called when an answer has ended.
    """
    gate = nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)

    async def one(request: LoadRequest) -> LoadResult:
        async with gate:
            result = await _ask(target, load, request)
        on_end()
        return result

    tasks: list[asyncio.Future[LoadResult]] = []
    due = time.perf_counter()
    try:
        for request, wait in zip(requests, load.waits(len(requests))):
            due += wait
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(one(request)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _ask(target: Target, load: Load, request: LoadRequest) -> LoadResult:
    result = LoadResult(request.num_prompt, time.perf_counter())
    try:
        async with aclosing(target.events(load.endpoint, load.body(request))) as events:  # type: ignore[type-var]
            async for event in events:
                _take(result, event, time.perf_counter())
    except (OSError, BadAnswer, EOFError) as error:
        result.error = str(error) or type(error).__name__
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        result.error = f"an event has an unexpected form: {error!r}"
    result.ended = time.perf_counter()
    if not result.error and not result.delta_times:
        result.error = "the answer has no text"
    return result


def _take(result: LoadResult, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(
            delta.get(name) for name in ("content", "reasoning_content", "reasoning")
        ):
            result.delta_times.append(now)
            result.num_new = max(result.num_new, len(result.delta_times))
    usage = event.get("usage")
    if usage:
        result.num_prompt = int(usage["prompt_tokens"])
        result.num_new = int(usage["completion_tokens"])
