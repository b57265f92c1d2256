"""`History`: the tokens of a growing sequence. Ids are checked when they are added."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core import Validator
from tilewise.kernels.sampling import TokenHistory

__all__ = ["History"]

_validate = Validator("generate")
_LARGEST_ID = (1 << 32) - 1


class History:
    """Tokens of a prompt and of the text after it.

    Args:
        prompt: token ids of the prompt.

    Raises:
        ConfigError: an id is invalid.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        ids = _validate.sequence("history", "a prompt", prompt, "ids")
        self.ids = [_validate.integer("history", "an id of a prompt", id_, 0, _LARGEST_ID) for id_ in ids]
        self.num_prompt = len(self.ids)
        self._counted: TokenHistory | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_new(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.ids) - self.num_prompt

    def append(self, token: int) -> None:
        """Append a token, and check its id."""
        self.push(_validate.integer("history", "a token", token, 0, _LARGEST_ID))

    def push(self, token: int) -> None:
        """Append a sampled token, whose id is valid."""
        self.ids.append(token)
        if self._counted is not None:
            self._counted.append(token)

    @property
    def counted(self) -> TokenHistory:
        """The same tokens with their counts, for native code; made when it is first used."""
        if self._counted is None:
            self._counted = TokenHistory(self.ids[: self.num_prompt])
            for token in self.ids[self.num_prompt :]:
                self._counted.append(token)
        return self._counted
