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

__all__ = ["Load", "Played", "Wanted", "play"]


@dataclass(frozen=True)
class Wanted:
    """A request.

    Attributes:
        prompt: its text, or its tokens.
        num_prompt: tokens of it, as far as they are known; the server's own count comes before.
        num_new: tokens that are asked for.
    """

    prompt: str | list[int]
    num_prompt: int
    num_new: int


@dataclass
class Played:
    """What came of a request; seconds of `time.perf_counter`.

    Attributes:
        num_prompt: tokens of the prompt.
        asked: when it was sent.
        delta_times: when each delta of its text arrived.
        num_new: tokens of the text.
        ended: when the answer was whole.
        error: why it is not; empty where it is.
    """

    num_prompt: int
    asked: float = 0.0
    delta_times: list[float] = field(default_factory=list)
    num_new: int = 0
    ended: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        endpoint: `/v1/completions` or `/v1/chat/completions`.
        model: the name of it.
        request_rate: requests a second on average; infinite: all at once.
        burstiness: 1: as by chance (Poisson); below it in bursts, above it more evenly.
        max_concurrency: at most so many at a time; None: no such limit.
        ignore_eos: texts are written to the length that is asked for.
        temperature: of the draws.
        seed: of arrivals and of draws.
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
        """Seconds before each request after the first; drawn from the seed, and all together as many as the rate
        says."""
        if self.request_rate == float("inf"):
            yield from [0.0] * count
            return
        rng = random.Random(self.seed)
        drawn = [rng.gammavariate(self.burstiness, 1.0) for _ in range(count - 1)]
        scale = (count - 1) / self.request_rate / (sum(drawn) or 1.0)
        yield 0.0
        yield from (wait * scale for wait in drawn)

    def body(self, wanted: Wanted) -> dict[str, Any]:
        """Of a request."""
        asked: dict[str, Any] = {"prompt": wanted.prompt}
        if self.endpoint.endswith("/chat/completions"):
            asked = {"messages": [{"role": "user", "content": wanted.prompt}]}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return {
            **asked,
            "model": self.model,
            "max_tokens": wanted.num_new,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def play(
    target: Target, load: Load, wanted: Sequence[Wanted], on_end: Callable[[], object] = lambda: None
) -> list[Played]:
    """Send all requests, and wait for all; one that fails is taken down as such.

    Args:
        target: the server.
        load: how they come.
        wanted: what they are.
        on_end: called when an answer has ended.
    """
    gate = nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)

    async def one(request: Wanted) -> Played:
        async with gate:
            played = await _ask(target, load, request)
        on_end()
        return played

    tasks: list[asyncio.Future[Played]] = []
    due = time.perf_counter()
    try:
        for request, wait in zip(wanted, load.waits(len(wanted))):
            due += wait
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(one(request)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _ask(target: Target, load: Load, request: Wanted) -> Played:
    played = Played(request.num_prompt, time.perf_counter())
    try:
        async with aclosing(target.events(load.endpoint, load.body(request))) as events:  # type: ignore[type-var]
            async for event in events:
                _take(played, event, time.perf_counter())
    except (OSError, BadAnswer, EOFError) as error:
        played.error = str(error) or type(error).__name__
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        played.error = f"an event of another form: {error!r}"
    played.ended = time.perf_counter()
    if not played.error and not played.delta_times:
        played.error = "no text came"
    return played


def _take(played: Played, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(
            delta.get(name) for name in ("content", "reasoning_content", "reasoning")
        ):
            played.delta_times.append(now)
            played.num_new = max(played.num_new, len(played.delta_times))
    usage = event.get("usage")
    if usage:
        played.num_prompt = int(usage["prompt_tokens"])
        played.num_new = int(usage["completion_tokens"])
