"""Asking a server of OpenAI's API as many clients would, and what its answers took.

Owns the client's side of HTTP, arrivals, and the figures that `vllm bench serve` prints. Any server will do.
"""

from tilewise.server.load.arrivals import Load, Played, Wanted, play
from tilewise.server.load.figures import METRICS, load_figures
from tilewise.server.load.target import BadAnswer, Target, require_answer

__all__ = [
    "METRICS",
    "BadAnswer",
    "Load",
    "Played",
    "Target",
    "Wanted",
    "load_figures",
    "play",
    "require_answer",
]
