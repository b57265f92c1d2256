"""Decides how many prompt tokens a step may read while texts are generated, from measured times of
steps.

A step with few tokens takes as long as reading the weights. A step with many tokens takes as long
as the computation. Up to the number of tokens for which both take equally long, further tokens cost
almost no time. So prompts are read in chunks of that size: this reads a prompt at full speed and
hardly slows down the generation of other texts. If the number of generated texts is larger than
that, a step reads as many prompt tokens as there are texts. Then neither reading prompts nor
generating takes more than twice as long as it would alone, even if reading weights and computing do
not overlap. The size of chunks changes no bit of the output, so measured times may decide it.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["USUAL_FREE_TOKENS", "PrefillBudget"]

USUAL_FREE_TOKENS = 8
"""The budget before steps are measured: a lower bound on processors that multiply in bf16 or read memory slowly."""
_COMPUTE_BOUND_TOKENS = 64
_WINDOW = 9  # steps of a kind whose median is used


class PrefillBudget:
    """Records times of steps. Not thread-safe.

    Attributes:
        free_tokens: prompt tokens that a step may read while texts are generated.
    """

    def __init__(self) -> None:
        self._decode_s: deque[float] = deque(maxlen=_WINDOW)  # seconds of steps with few tokens
        self._token_s: deque[float] = deque(maxlen=_WINDOW)  # seconds of a token among many
        self.free_tokens = USUAL_FREE_TOKENS

    def note(self, num_tokens: int, is_decode: bool, seconds: float) -> None:
        """Record a step.

        Args:
            num_tokens: tokens of the step.
            is_decode: whether all texts of the step are in decode, so that each has one token.
            seconds: time of the step.
        """
        if num_tokens >= _COMPUTE_BOUND_TOKENS:
            self._token_s.append(seconds / num_tokens)
        elif is_decode and num_tokens <= max(self.free_tokens, USUAL_FREE_TOKENS):
            self._decode_s.append(seconds)
        else:
            return
        if self._decode_s and self._token_s:
            token = max(statistics.median(self._token_s), 1e-9)
            self.free_tokens = max(1, int(statistics.median(self._decode_s) / token))
