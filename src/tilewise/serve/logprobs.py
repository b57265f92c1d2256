"""Log probabilities of tokens, from raw logits before penalties and temperature.

They depend on one row of logits only, so they are the same bits wherever the row was computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Logprob", "TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token. Among equally likely tokens the lower id comes first.
        decoded_token: the token's text with its leading space. Bytes that are only a part of a
            character become U+FFFD. None if outputs have no text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Log probabilities by token id: the chosen token first, then the most likely ones."""


def token_logprobs(logits_V: NDArray[Any], token: int, count: int) -> TokenLogprobs:
    """Log probabilities of the chosen token and of the `count` most likely tokens. A `count` of -1
    stands for all tokens.
    """
    scores = np.array(logits_V, np.float64)
    scores -= scores.max()
    logs = scores - np.log(np.exp(scores).sum())
    size = len(logs) if count < 0 else min(count, len(logs))
    least = np.partition(logs, len(logs) - size)[len(logs) - size] if size else np.inf
    few = np.flatnonzero(logs >= least)
    few = few[np.argsort(-logs[few], kind="stable")][:size]
    rank = int((logs > logs[token]).sum() + (logs[:token] == logs[token]).sum()) + 1
    logprobs = {token: Logprob(float(logs[token]), rank)}
    for place, id_ in enumerate(few.tolist(), 1):
        logprobs.setdefault(id_, Logprob(float(logs[id_]), place))
    return logprobs
