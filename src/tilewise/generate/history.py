"""The tokens of a growing sequence. Ids are checked once, when they come in."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core import Border
from tilewise.kernels.sampling import TokenHistory

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
        self._counted: TokenHistory | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_new(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - self.num_prompt

    def append(self, token: int) -> None:
        """One more token was written."""
        self.push(_border.integer("history", "a token", token, 0, _LARGEST_ID))

    def push(self, token: int) -> None:
        """One more token was drawn, which is known to be an id."""
        self.ids.append(token)
        if self._counted is not None:
            self._counted.append(token)

    @property
    def counted(self) -> TokenHistory:
        """The same tokens as native code reads them, counted; made when it is first asked for."""
        if self._counted is None:
            self._counted = TokenHistory(self.ids[: self.num_prompt])
            for token in self.ids[self.num_prompt :]:
                self._counted.append(token)
        return self._counted
