"""Metrics of a server in Prometheus' text format, with vLLM's names.

The HTTP process measures times, from the end of reading a request to the moment when a token can be
sent. The engine's process reports when a text left the queue; both processes use the machine's
monotonic clock.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewise.serve import EngineStats

__all__ = ["Histogram", "Metrics", "Rates", "RequestTimes"]

_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_WHOLE = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_MOST_RATES = 120
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Histogram:
    """Counts of values by upper bound.

    Args:
        bounds: upper bounds in ascending order.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """The lines of Prometheus's text format."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts):
            total += count
            buckets.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*buckets, f"{name}_sum{{{labels}}} {self._sum:.9g}", f"{name}_count{{{labels}}} {total}"]


class Rates:
    """The number of tokens generated in each of the last seconds, for the status page.

    Args:
        begun: when counting begins, in seconds of `time.monotonic`.
    """

    def __init__(self, begun: float) -> None:
        self._begun = int(begun)
        self._counts: dict[int, int] = {}  # by second; seconds without tokens have no entry

    def add(self, now: float) -> None:
        """Count a token."""
        second = int(now)
        self._counts[second] = self._counts.get(second, 0) + 1
        if len(self._counts) > _MOST_RATES + 1:
            del self._counts[next(iter(self._counts))]  # the oldest

    def last(self, now: float) -> list[int]:
        """Number of tokens in each full second since counting began, oldest first. At most the last
        two minutes.
        """
        begin = max(self._begun, int(now) - _MOST_RATES)
        return [self._counts.get(second, 0) for second in range(begin, int(now))]


@dataclass
class TextTimes:
    """Times of one text.

    Attributes:
        scheduled: when it left the queue.
        first: when its first token arrived.
        newest: when its newest token arrived.
    """

    scheduled: float
    first: float
    newest: float


@dataclass
class RequestTimes:
    """Times of one request.

    Attributes:
        begun: when it was read.
        texts: times of its texts, by prompt and choice.
    """

    begun: float
    texts: dict[tuple[int, int], TextTimes] = field(default_factory=dict)


class Metrics:
    """The metrics of a server. Not thread-safe.

    Args:
        model_name: the label of all figures.

    Attributes:
        rates: tokens generated in each of the last seconds.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = 'model_name="' + _escaped(model_name) + '"'
        self._totals = dict.fromkeys(
            ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"), 0
        )
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._responses: dict[tuple[str, int], int] = {}
        self.rates = Rates(time.monotonic())
        self._histograms = {
            "time_to_first_token_seconds": Histogram(_FIRST),
            "inter_token_latency_seconds": Histogram(_BETWEEN),
            "e2e_request_latency_seconds": Histogram(_WHOLE),
            "request_queue_time_seconds": Histogram(_WHOLE),
            "request_prefill_time_seconds": Histogram(_WHOLE),
            "request_decode_time_seconds": Histogram(_WHOLE),
            "request_inference_time_seconds": Histogram(_WHOLE),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
        }

    def read_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Record a prompt that was read, and the number of its tokens from the prefix cache."""
        self._totals["prompt_tokens"] += num_tokens
        self._totals["prefix_cache_queries"] += num_tokens
        self._totals["prefix_cache_hits"] += num_cached
        self._histograms["request_prompt_tokens"].add(num_tokens)

    def wrote_token(
        self, times: RequestTimes, place: tuple[int, int], now: float, scheduled: float | None = None
    ) -> None:
        """Record a token of a text.

        Args:
            times: times of the text's request.
            place: numbers of the text's prompt and choice.
            now: the current time.
            scheduled: when the text left the queue; reported only with its first token.
        """
        self._totals["generation_tokens"] += 1
        self.rates.add(now)
        text = times.texts.get(place)
        if text is None:
            times.texts[place] = TextTimes(now if scheduled is None else scheduled, now, now)
            self._histograms["time_to_first_token_seconds"].add(now - times.begun)
        else:
            self._histograms["inter_token_latency_seconds"].add(now - text.newest)
            text.newest = now

    def finish_text(
        self, num_tokens: int, reason: str, times: RequestTimes | None = None, place: tuple[int, int] = (0, 0)
    ) -> None:
        """Record the end of a text.

        Args:
            num_tokens: number of generated tokens.
            reason: why the text ended.
            times: times of the text's request, if the text has generated tokens; otherwise None.
            place: numbers of the text's prompt and choice.
        """
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._histograms["request_generation_tokens"].add(num_tokens)
        text = None if times is None else times.texts.get(place)
        if times is not None and text is not None:
            for name, seconds in (
                ("queue", text.scheduled - times.begun),
                ("prefill", text.first - text.scheduled),
                ("decode", text.newest - text.first),
                ("inference", text.newest - text.scheduled),
            ):
                self._histograms[f"request_{name}_time_seconds"].add(max(0.0, seconds))

    def finish_request(self, seconds: float) -> None:
        """Record the end of a request."""
        self._histograms["e2e_request_latency_seconds"].add(seconds)

    def answer(self, path: str, status: int) -> None:
        """Record the beginning of an answer.

        Args:
            path: the route's pattern, so that the number of different paths is small.
            status: HTTP status.
        """
        self._responses[path, status] = self._responses.get((path, status), 0) + 1

    def text(self, stats: EngineStats | None) -> str:
        """The content of `/metrics`.

        Args:
            stats: load of the engine; None if there is no engine.
        """
        lines: list[str] = []
        if stats is not None:
            usage = 1 - stats.num_free_blocks / max(1, stats.num_blocks)
            self._plain(
                lines, "num_requests_running", "gauge", "Texts that are generated.", stats.num_running
            )
            self._plain(lines, "num_requests_waiting", "gauge", "Texts that wait.", stats.num_waiting)
            self._plain(lines, "kv_cache_usage_perc", "gauge", "Share of the KV cache that texts use.", usage)
            self._plain(
                lines,
                "num_preemptions_total",
                "counter",
                "Texts that lost their blocks to older ones.",
                stats.num_preemptions,
            )
        for name, value in self._totals.items():
            self._plain(lines, f"{name}_total", "counter", _HELP[name], value)
        _head(lines, "vllm:request_success_total", "counter", "Finished texts, by reason.")
        for reason, count in self._finished.items():
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {count}')
        _head(lines, "tilewise:http_responses_total", "counter", "Answers by path and status.")
        for (path, status), count in sorted(self._responses.items()):
            lines.append(
                f'tilewise:http_responses_total{{{self._labels},path="{_escaped(path)}",status="{status}"}} {count}'
            )
        for name, histogram in self._histograms.items():
            _head(lines, f"vllm:{name}", "histogram", _HELP[name])
            lines += histogram.lines(f"vllm:{name}", self._labels)
        return "\n".join(lines) + "\n"

    def _plain(self, lines: list[str], name: str, kind: str, text: str, value: float) -> None:
        _head(lines, f"vllm:{name}", kind, text)
        lines.append(f"vllm:{name}{{{self._labels}}} {value:.9g}")


_HELP = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "time_to_first_token_seconds": "From a request to the first token of a text.",
    "inter_token_latency_seconds": "Between two tokens of a text.",
    "e2e_request_latency_seconds": "From a request to the end of its last text.",
    "request_queue_time_seconds": "From a request to the first step that a text is part of.",
    "request_prefill_time_seconds": "From the first step that a text is part of to its first token.",
    "request_decode_time_seconds": "From a text's first token to its last.",
    "request_inference_time_seconds": "From the first step that a text is part of to its last token.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of a text.",
}


def _head(lines: list[str], name: str, kind: str, text: str) -> None:
    lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
