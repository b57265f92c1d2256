"""What a model thought of a token: logarithms of probabilities, from raw logits before penalties and temperature.

A function of one row of logits alone, so the figures are the same bits wherever the row was computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Logprob", "TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place.

    Attributes:
        logprob: logarithm of its probability.
        rank: 1 for the likeliest; of equally likely ones the lower id comes first.
        decoded_token: its text, where there is a tokenizer: with its leading space, U+FFFD for bytes that are only a
            part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""By token: the one that came first, then the likeliest ones."""


def token_logprobs(logits_V: NDArray[Any], token: int, count: int) -> TokenLogprobs:
    """Figures of the token that came and of the `count` likeliest ones, -1 for all."""
    scores = np.array(logits_V, np.float64)
    scores -= scores.max()
    logs = scores - np.log(np.exp(scores).sum())
    size = len(logs) if count < 0 else min(count, len(logs))
    least = np.partition(logs, len(logs) - size)[len(logs) - size] if size else np.inf
    few = np.flatnonzero(logs >= least)
    few = few[np.argsort(-logs[few], kind="stable")][:size]
    rank = int((logs > logs[token]).sum() + (logs[:token] == logs[token]).sum()) + 1
    found = {token: Logprob(float(logs[token]), rank)}
    for place, id_ in enumerate(few.tolist(), 1):
        found.setdefault(id_, Logprob(float(logs[id_]), place))
    return found
