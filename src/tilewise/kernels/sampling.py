"""Tokens drawn from rows of logits: the face of native/kernels/sampling.

Penalties, filters and draw are a function of a row, its settings, its text and its key alone: not of the rows next to
it, nor of the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import _native
from tilewise._native.sampling import Rules, TokenHistory

__all__ = ["NOTHING_LEFT", "NOT_FINITE", "Adjustment", "Rules", "TokenHistory", "adjust_row", "draw_tokens"]

NOT_FINITE: int = _native.sampling.NOT_FINITE
"""Instead of a token: a logit is NaN or infinite."""
NOTHING_LEFT: int = _native.sampling.NOTHING_LEFT
"""Instead of a token: every one is forbidden."""
Adjustment = tuple[Rules | None, TokenHistory | None, NDArray[np.uint8] | None]
"""Rules with their text, or neither, and a mask `[vocab]` whose zeros may not come, or none."""


def draw_tokens(
    logits: NDArray[Any],
    rows: NDArray[np.int64],
    settings: NDArray[np.float64],
    keys: NDArray[np.uint64],
    threads: int = 1,
    adjustments: Sequence[Adjustment | None] = (),
) -> list[int]:
    """A token for each row, or why there is none.

    Args:
        logits: `[R, vocab]`, float32, float64, or uint16 that stand for bf16.
        rows: of them that are drawn from, as often as they stand there.
        settings: `[rows, 5]`: temperature, top_k, top_p, min_p, typical_p.
        keys: `[rows, 3]`: seed, position, choice.
        threads: that share the rows.
        adjustments: of each row, or none at all.

    Raises:
        ArgumentError: shapes, settings or adjustments that are invalid.
    """
    found: list[int] = _native.sampling.draw(logits, rows, settings, keys, threads, list(adjustments))
    return found


def adjust_row(scores: NDArray[np.float64], adjustment: Adjustment) -> None:
    """What an adjustment does to a row of finite numbers, in place; what may not come is minus infinity.

    Args:
        scores: `[vocab]`.
        adjustment: of the row.

    Raises:
        ArgumentError: rules that name a token beyond the row.
    """
    _native.sampling.adjust(scores, adjustment)
