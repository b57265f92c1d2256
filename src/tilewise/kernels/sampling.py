"""Samples tokens from rows of logits in native code. This is the Python interface of
native/kernels/sampling.

A row's token depends on its logits, settings, processors and key alone, not on other rows or on the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import _native
from tilewise._native.sampling import Rules, TokenHistory

__all__ = [
    "NOTHING_LEFT",
    "NOT_FINITE",
    "LogitsProcessors",
    "Rules",
    "TokenHistory",
    "apply_logits_processors",
    "sample_tokens",
]

NOT_FINITE: int = _native.sampling.NOT_FINITE
"""Returned in place of a token: a logit is NaN or infinite."""
NOTHING_LEFT: int = _native.sampling.NOTHING_LEFT
"""Returned in place of a token: every token is forbidden."""
LogitsProcessors = tuple[Rules | None, TokenHistory | None, NDArray[np.uint8] | None]
"""The logits processors of a row: rules with the history they apply to, or neither, and a mask `[vocab]`, 0 for
forbidden tokens, or None."""


def sample_tokens(
    logits: NDArray[Any],
    rows: NDArray[np.int64],
    settings: NDArray[np.float64],
    keys: NDArray[np.uint64],
    threads: int = 1,
    processors: Sequence[LogitsProcessors | None] = (),
) -> list[int]:
    """Sample a token from each row.

    Args:
        logits: `[R, vocab]`, float32, float64, or bf16 as uint16.
        rows: the rows of `logits` to sample from; a row may occur more than once.
        settings: `[rows, 5]`: temperature, top_k, top_p, min_p, typical_p.
        keys: `[rows, 3]`: seed, position, choice.
        threads: number of threads that share the rows.
        processors: the logits processors of each row; empty if no row has any.

    Returns:
        Token ids; NOT_FINITE or NOTHING_LEFT for a row without a token.

    Raises:
        ArgumentError: shapes, settings or processors are invalid.
    """
    tokens: list[int] = _native.sampling.sample(logits, rows, settings, keys, threads, list(processors))
    return tokens


def apply_logits_processors(scores: NDArray[np.float64], processors: LogitsProcessors) -> None:
    """Apply logits processors to a row of finite numbers in place. Forbidden tokens get minus
    infinity.

    Args:
        scores: `[vocab]`.
        processors: logits processors of the row.

    Raises:
        ArgumentError: a processor names a token beyond the row.
    """
    _native.sampling.apply_logits_processors(scores, processors)
