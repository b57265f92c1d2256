"""From logits to one token: greedy, or drawn with temperature, top-k and top-p.

A draw depends on the logits, the seed and the position only (Philox keyed by the two), never on the batch or
the devices. Ties go to the lower id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import ConfigError

__all__ = ["Sampling", "pick_token"]


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

    Args:
        max_tokens: at most so many new tokens.
        temperature: 0 takes the likeliest token.
        top_k: draw among the k likeliest only; 0 for all.
        top_p: draw among the likeliest that together have this probability.
        seed: of the draws; sequence i of a batch uses `seed + i`.

    Raises:
        ConfigError: a value outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = (
            (self.max_tokens >= 1, "max_tokens must be at least 1", self.max_tokens),
            (0 <= self.temperature < math.inf, "temperature must be finite and at least 0", self.temperature),
            (self.top_k >= 0, "top_k must be at least 0", self.top_k),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1", self.top_p),
            (0 <= self.seed < 2**63, "seed must be at least 0 and below 2**63", self.seed),
        )
        for holds, rule, value in ranges:
            if not holds:
                raise ConfigError(f"[generate.sampling] {rule}; got {value}; choose another value")


def pick_token(logits: NDArray[Any], sampling: Sampling, seed: int, position: int) -> int:
    """The next token of a sequence.

    Args:
        logits: `[vocab]`.
        seed: of this sequence.
        position: of the new token in the sequence.
    """
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    sums = np.cumsum(weights)
    if sampling.top_p < 1:
        keep = int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1
        sums = sums[:keep]
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, position], np.uint64))).random()
    return int(order[min(int(np.searchsorted(sums, draw * sums[-1], side="right")), len(sums) - 1)])
