"""Puts load on a server with OpenAI's API, as many clients would, and measures its answers.

This package has the client side of HTTP, the arrival of requests, and the figures that `vllm bench
serve` prints.
"""

from tilewise.server.load.arrivals import Load, LoadRequest, LoadResult, play
from tilewise.server.load.figures import METRICS, load_figures
from tilewise.server.load.target import BadAnswer, Target, require_answer

__all__ = [
    "METRICS",
    "BadAnswer",
    "Load",
    "LoadRequest",
    "LoadResult",
    "Target",
    "load_figures",
    "play",
    "require_answer",
]
