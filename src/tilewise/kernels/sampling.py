"""Tokens drawn from rows of logits: the face of native/kernels/sampling.

Filters and draw are a function of a row, its settings and its key alone: not of the rows beside it, nor of the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from tilewise import _native

__all__ = ["NOTHING_LEFT", "NOT_FINITE", "draw_tokens"]

NOT_FINITE: int = _native.sampling.NOT_FINITE
"""Instead of a token: a logit is NaN or infinite."""
NOTHING_LEFT: int = _native.sampling.NOTHING_LEFT
"""Instead of a token: every one is forbidden."""


def draw_tokens(
    rows: Sequence[NDArray[Any]], settings: NDArray[Any], keys: NDArray[Any], threads: int = 1
) -> list[int]:
    """A token for each row, or why there is none.

    Args:
        rows: `[vocab]` each: float32, or float64 where minus infinity says that a token may not come.
        settings: float64 `[rows, 5]`: temperature, top_k, top_p, min_p, typical_p.
        keys: uint64 `[rows, 3]`: seed, position, choice.
        threads: that share the rows.

    Raises:
        ArgumentError: shapes or settings that are none.
    """
    found: list[int] = _native.sampling.draw(list(rows), settings, keys, threads)
    return found
