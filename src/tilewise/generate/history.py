"""The tokens of a growing sequence, and what sampling asks about them: how often each was written, what stood before.

Ids are checked once, when they come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Border

__all__ = ["History"]

_border = Border("generate")
_LARGEST_ID = (1 << 32) - 1


class History:
    """A prompt and what was written after it.

    Args:
        prompt: ids of it.

    Raises:
        ConfigError: an id is none.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        ids = _border.sequence("history", "a prompt", prompt, "ids")
        self.ids = [_border.integer("history", "an id of a prompt", id_, 0, _LARGEST_ID) for id_ in ids]
        self.num_prompt = len(self.ids)
        self._seen = dict.fromkeys(self.ids)
        self._written: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_new(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - self.num_prompt

    def append(self, token: int) -> None:
        """One more token was written."""
        token = _border.integer("history", "a token", token, 0, _LARGEST_ID)
        self.ids.append(token)
        self._seen[token] = None
        self._written[token] += 1

    def seen(self) -> NDArray[np.int64]:
        """Every id of prompt and text, once."""
        return np.fromiter(self._seen, np.int64, len(self._seen))

    def written(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids written after the prompt, and how often."""
        size = len(self._written)
        return np.fromiter(self._written, np.int64, size), np.fromiter(self._written.values(), np.int64, size)

    def ends_with(self, ids: Sequence[int]) -> bool:
        """Whether the last tokens are these."""
        return not ids or self.ids[-len(ids) :] == list(ids)

    def after_last(self, size: int) -> NDArray[np.int64]:
        """What followed earlier occurrences of the last `size` tokens."""
        ids = np.array(self.ids, np.int64)
        if len(ids) <= size:
            return ids[:0]
        if size == 0:
            return ids
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
        places = np.flatnonzero((windows == ids[-size:]).all(axis=1))
        return ids[places + size]
