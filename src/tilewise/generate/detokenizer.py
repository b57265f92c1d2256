"""Text from tokens as they come, never half a character.

A byte-level token may end inside a UTF-8 character, and some tokenizers treat the first token of a text specially; so
the last tokens are decoded together with those before them, and what may still become a whole character is kept back.
Bytes that are no text, and ids that the tokenizer does not know (a model's vocabulary may be padded), are shown as
U+FFFD, so nothing that a model said vanishes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.core import Border, ConfigError
from tilewise.core.border import shown
from tilewise.core.reading import Unreadable, refusals_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Detokenizer"]

_border = Border("generate")
_LARGEST_ID = (1 << 32) - 1
_BROKEN = "\ufffd"
_PATIENCE = 8  # tokens without a whole end, after which only the last character can still be mended
_LONGEST = 64  # tokens decoded together at most


class Detokenizer:
    """The text of one growing sequence.

    Args:
        tokenizer: of the model.
        prompt: ids that stand before; they give context and no text.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], *, skip_special_tokens: bool = True) -> None:
        self._skips = _border.truth("detokenizer", "skip_special_tokens", skip_special_tokens)
        self._tokenizer = tokenizer
        ids = list(_border.sequence("detokenizer", "a prompt", prompt, "ids"))[-8:]
        self._ids = [_border.integer("detokenizer", "an id of a prompt", id_, 0, _LARGEST_ID) for id_ in ids]
        self._start = 0  # of what is decoded together
        self._given = len(self._ids)  # tokens whose text is out
        self._ahead = 0  # characters of later tokens that are out

    def add(self, token: int) -> str:
        """Take one more token; returns the text that became whole, often empty."""
        token = _border.integer("detokenizer", "a token", token, 0, _LARGEST_ID)
        if self._tokenizer.id_to_token(token) is None:
            return self._take(self._decode(len(self._ids)), is_whole=True) + _BROKEN
        self._ids.append(token)
        now = self._decode(len(self._ids))
        waiting = len(self._ids) - self._given
        if not now.endswith(_BROKEN) or waiting >= _LONGEST:
            return self._take(now, is_whole=True)
        return self._take(now.rstrip(_BROKEN) if waiting < _PATIENCE else now[:-1], is_whole=False)

    def finish(self) -> str:
        """What was kept back, when no more tokens come: an unfinished character is shown as U+FFFD."""
        return self._take(self._decode(len(self._ids)), is_whole=True)

    def _take(self, text: str, *, is_whole: bool) -> str:
        """What of the text decoded together was not out yet; the next begins anew where this one is whole."""
        new = text[len(self._decode(self._given)) + self._ahead :]
        if is_whole:
            self._start, self._given, self._ahead = self._given, len(self._ids), 0
        else:
            self._ahead += len(new)
        return new

    def _decode(self, end: int) -> str:
        ids = self._ids[self._start : end]
        try:
            with refusals_of("tokenizers"):
                return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips))
        except Unreadable as error:
            raise ConfigError(
                f"[generate.detokenizer] tokens must have a text in tokenizer.json; got {shown(ids)}: {error}; "
                "check the tokenizer"
            ) from None
