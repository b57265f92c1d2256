"""Text from tokens as they come, never half a character.

A byte-level token may end inside a UTF-8 character, and some tokenizers treat the first token of a text
specially; so the last tokens are decoded together with those before them, and text is given out only when it
ends in a whole character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Detokenizer"]

_BROKEN = "\ufffd"


class Detokenizer:
    """The text of one growing sequence.

    Args:
        tokenizer: of the model.
        prompt: ids that stand before; they give context and no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt[-8:]
        self._start = 0
        self._given = len(self._ids)

    def add(self, token: int) -> str:
        """Take one more token; returns the text that became whole, often empty."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._given])
        now = self._decode(self._ids[self._start :])
        if now.endswith(_BROKEN) and len(self._ids) - self._given < 8:
            return ""
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
