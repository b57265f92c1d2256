"""How much of a prompt a step reads while others write, from what steps took.

A step with few tokens takes as long as reading the weights does, a step with many as long as computing does. Up to
where the two are equal, tokens are nearly free, so a prompt that is read in such chunks keeps its speed, and texts keep
theirs. Where more texts write than that, as many tokens are read. Either way neither takes more than twice as long as
alone, also where reading weights and computing do not overlap at all.
Chunks decide no bit of what is written, so times may choose them.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["USUAL_FREE_TOKENS", "Pace"]

USUAL_FREE_TOKENS = 8
"""Until steps were measured: what processors that multiply in bf16 or read memory slowly have at least."""
_MANY = 64  # tokens of a step that computing bounds
_KEPT = 9  # steps of a kind, of which the median counts


class Pace:
    """Takes down what steps took. One thread at a time."""

    def __init__(self) -> None:
        self._writing: deque[float] = deque(maxlen=_KEPT)  # seconds of steps with few tokens
        self._token: deque[float] = deque(maxlen=_KEPT)  # seconds of a token among many
        self.free_tokens = USUAL_FREE_TOKENS

    def note(self, num_tokens: int, is_writing: bool, seconds: float) -> None:
        """A step was made.

        Args:
            num_tokens: of it.
            is_writing: each of them is another text's.
            seconds: that it took.
        """
        if num_tokens >= _MANY:
            self._token.append(seconds / num_tokens)
        elif is_writing and num_tokens <= max(self.free_tokens, USUAL_FREE_TOKENS):
            self._writing.append(seconds)
        else:
            return
        if self._writing and self._token:
            token = max(statistics.median(self._token), 1e-9)
            self.free_tokens = max(1, int(statistics.median(self._writing) / token))
