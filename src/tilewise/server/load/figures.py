"""Computes the figures that `vllm bench serve` prints and writes, from the times of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.server.load.arrivals import LoadResult

__all__ = ["METRICS", "load_figures"]

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def load_figures(results: Sequence[LoadResult], ranks: Sequence[float]) -> dict[str, Any]:
    """The figures under vLLM's names, with latencies in milliseconds. Tokens and latencies of
    failed requests are left out.

    Args:
        results: results of all requests.
        ranks: the percentiles to compute of each metric.
    """
    completed = [one for one in results if not one.error]
    begun, ended = min(one.submitted for one in results), max(one.ended for one in results)
    duration = max(ended - begun, 1e-9)
    num_prompt, num_new = sum(one.num_prompt for one in completed), sum(one.num_new for one in completed)
    values = {
        "ttft": [one.delta_times[0] - one.submitted for one in completed],
        "tpot": [
            (one.delta_times[-1] - one.delta_times[0]) / (one.num_new - 1)
            for one in completed
            if one.num_new > 1
        ],
        "itl": [gap for one in completed for gap in np.diff(one.delta_times).tolist()],
        "e2el": [one.ended - one.submitted for one in completed],
    }
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(completed),
        "failed": len(results) - len(completed),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_new,
        "request_throughput": len(completed) / duration,
        "output_throughput": num_new / duration,
        "total_token_throughput": (num_prompt + num_new) / duration,
        "max_concurrent_requests": _most_at_once(results),
    }
    for name, seconds in values.items():
        if seconds:
            figures |= _of_metric(name, np.array(seconds) * 1e3, ranks)
    figures["errors"] = sorted({one.error for one in results if one.error})
    return figures


def _of_metric(name: str, values: Any, ranks: Sequence[float]) -> dict[str, float]:
    values_by_name = {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": np.median(values),
        f"std_{name}_ms": values.std(),
    }
    values_by_name |= {f"p{rank:g}_{name}_ms": np.percentile(values, rank) for rank in ranks}
    return {key: float(value) for key, value in values_by_name.items()}


def _most_at_once(results: Sequence[LoadResult]) -> int:
    changes = sorted([(one.submitted, 1) for one in results] + [(one.ended, -1) for one in results])
    return int(np.cumsum([change for _, change in changes]).max())
