"""From logits to one token: greedy, or drawn with temperature, top-k and top-p.

A draw depends on the logits, the seed and the position only (Philox keyed by the two), never on the batch, a
request's place in it, or the devices. Ties go to the lower id. Refuses logits that are no finite numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Border, NotFinite, is_float, shown

__all__ = ["Sampling", "pick_token"]

_border = Border("generate")
_MAX = 1 << 53


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

    Args:
        max_tokens: at most so many new tokens.
        temperature: 0 takes the likeliest token.
        top_k: draw among the k likeliest only; 0 for all.
        top_p: draw among the likeliest that together have this probability.
        seed: of the draws.

    Raises:
        ConfigError: a value outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _border.integer("sampling", "max_tokens", self.max_tokens, 1, _MAX)
        _border.number("sampling", "temperature", self.temperature, 0.0)
        _border.integer("sampling", "top_k", self.top_k, 0, _MAX)
        if _border.number("sampling", "top_p", self.top_p, 0.0, 1.0) == 0:
            _border.refuse("sampling", "top_p must be above 0", str(self.top_p), "pass 1.0 for all tokens")
        _border.integer("sampling", "seed", self.seed, 0, 2**63 - 1)


def pick_token(logits: NDArray[Any], sampling: Sampling, position: int) -> int:
    """The next token of a sequence.

    Args:
        logits: `[vocab]`.
        position: of the new token in the sequence.

    Raises:
        ConfigError: the logits are no row of numbers.
        NotFinite: a logit is NaN or infinite.
    """
    _border.instance("sampling", "sampling", sampling, Sampling, "pass Sampling(...)")
    position = _border.integer("sampling", "a position", position, 0, 2**63 - 1)
    if (
        not isinstance(logits, np.ndarray)
        or logits.ndim != 1
        or not logits.size
        or not is_float(logits.dtype)
    ):
        _border.refuse("sampling", "logits are one row of numbers", shown(logits), "pass a row of them")
    if not np.isfinite(logits).all():
        at = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise NotFinite(
            f"[generate.sampling] logits must be finite; got {logits[at]} for token {at} at position {position}; the "
            "model overflows, or its weights are damaged: try f32"
        )
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    below = logits.astype(np.float64)
    below -= below.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest alone
        scaled = below / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(scaled[order])
    sums = np.cumsum(weights)
    if sampling.top_p < 1:
        keep = int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1
        sums = sums[:keep]
    draw = np.random.Generator(np.random.Philox(key=np.array([sampling.seed, position], np.uint64))).random()
    return int(order[min(int(np.searchsorted(sums, draw * sums[-1], side="right")), len(sums) - 1)])
