"""Incremental detokenizer: text from tokens in complete characters, the offset of each token, and stop strings.

A byte-level token may end inside a UTF-8 character, and some tokenizers treat the first token of a text specially. So
the last tokens are decoded together with those before them, and text that later tokens may change is held back. Bytes
that are not UTF-8, and ids that the tokenizer does not know (a model's vocabulary may be padded), become U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.core import ConfigError, Validator
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, refusals_of
from tilewise.generate.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Detokenizer", "StopFinder", "TextOffsets"]

_validate = Validator("generate")
_LARGEST_ID = (1 << 32) - 1
_BROKEN = "\ufffd"
_PATIENCE = 8  # after this many tokens without a complete character, only the last character is held back
_LONGEST = 64  # tokens decoded together at most


class Detokenizer:
    """Detokenizes one sequence.

    Args:
        tokenizer: tokenizer of the model.
        prompt: ids before the text, which are context only.
        skip_special_tokens: leave special tokens out of the text.

    Attributes:
        num_pending: number of characters that are held back, each U+FFFD unless later tokens complete it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], *, skip_special_tokens: bool = True) -> None:
        self._skips = bool(skip_special_tokens)
        self._tokenizer = tokenizer
        ids = list(_validate.sequence("detokenizer", "a prompt", prompt, "ids"))[-8:]
        self._ids = [
            _validate.integer("detokenizer", "an id of a prompt", id_, 0, _LARGEST_ID) for id_ in ids
        ]
        self._start = 0  # first token of those decoded together
        self._num_returned = len(self._ids)  # tokens whose text was returned
        self._num_ahead = 0  # characters of later tokens that were returned
        self.num_pending = 0

    def add(self, token: int) -> str:
        """Add a token; returns the new complete characters, often none."""
        token = _validate.integer("detokenizer", "a token", token, 0, _LARGEST_ID)
        if self._tokenizer.id_to_token(token) is None:
            return self._take(self._decode(len(self._ids))) + _BROKEN
        self._ids.append(token)
        now = self._decode(len(self._ids))
        num_waiting = len(self._ids) - self._num_returned
        if not now.endswith(_BROKEN) or num_waiting >= _LONGEST:
            return self._take(now)
        return self._take(now, num_last=len(now) - len(now.rstrip(_BROKEN)) if num_waiting < _PATIENCE else 1)

    def finish(self) -> str:
        """The text that was held back, after the last token; an incomplete character becomes U+FFFD."""
        return self._take(self._decode(len(self._ids)))

    def _take(self, text: str, num_last: int = 0) -> str:
        """The new part of a decoded text, without its last `num_last` characters, which are held back. When no
        character is held back, the next tokens are decoded without those before."""
        num_out = len(self._decode(self._num_returned)) + self._num_ahead
        new = text[num_out : len(text) - num_last]
        if num_last:
            self._num_ahead += len(new)
        else:
            self._start, self._num_returned, self._num_ahead = self._num_returned, len(self._ids), 0
        self.num_pending = max(0, len(text) - num_out - len(new)) if num_last else 0
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


class TextOffsets:
    """Where each token of a growing text begins: an index of the text's characters.

    A token that continues a character of the token before has that character's index. A token that is left out of the
    text has the index of the next character.

    Args:
        detokenizer: of the text.
        token_bytes: of the same tokenizer.
    """

    def __init__(self, detokenizer: Detokenizer, token_bytes: TokenBytes) -> None:
        self._detokenizer, self._token_bytes = detokenizer, token_bytes
        self._num_out = 0  # characters that the detokenizer has returned
        self._last = b""  # bytes of the character that the last token ends in, and its index
        self._last_index = 0

    @property
    def end(self) -> int:
        """The number of characters so far, those that are held back included."""
        return self._num_out + self._detokenizer.num_pending

    def add(self, token: int) -> tuple[str, int]:
        """Take one more token; returns the text that became complete, and the index at which the token begins."""
        own, num_pending = self._token_bytes[token], self._detokenizer.num_pending
        continues = num_pending > 0 and _is_continuation(own[:1]) and _is_cut(self._last)
        offset = self._last_index if continues else self.end
        text = self._detokenizer.add(token)
        self._num_out += len(text)
        if text or self._detokenizer.num_pending != num_pending:  # the token is part of the text
            begun = [place for place in range(len(own)) if not _is_continuation(own[place : place + 1])]
            self._last_index = offset + max(0, len(begun) - (not continues))
            self._last = own[begun[-1] :] if begun else self._last + own
        return text, offset


def _is_continuation(byte: bytes) -> bool:
    """Whether a byte lies within a character of UTF-8, and is not its first."""
    return b"\x80" <= byte < b"\xc0"


def _is_cut(character: bytes) -> bool:
    """Whether bytes of a character are missing."""
    first = character[0] if character else 0
    return len(character) < 1 + (first >= 0xC2) + (first >= 0xE0) + (first >= 0xF0)


class StopFinder:
    """Finds the stop strings of one growing text.

    Text that may begin a stop string is held back until that is decided. The text ends at the first position where a
    stop string is complete (of several there, the longest), so the end does not depend on how tokens split the text.

    Args:
        strings: stop strings, none of them empty.
        is_included: whether the stop string is part of the text.

    Attributes:
        stop_string: the one that ended the text; None before.
    """

    def __init__(self, strings: Sequence[str], is_included: bool) -> None:
        self._strings = tuple(strings)
        self._is_included = is_included
        self._held_back = ""
        self.stop_string: str | None = None

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; returns the text that can be shown, and whether a stop string has ended it."""
        text = self._held_back + text
        matches = [
            (at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0
        ]
        if matches:
            end, start, self.stop_string = min(matches)
            self._held_back = ""
            return text[: end if self._is_included else start], True
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text that was held back, after the last `add`."""
        text, self._held_back = self._held_back, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `string`."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
