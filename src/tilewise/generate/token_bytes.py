"""Bytes of single tokens, for log probabilities.

A tokenizer decodes whole texts: it drops the first space of a text (SentencePiece) and replaces bytes that are only a
part of a character by U+FFFD. `TokenBytes` gives the bytes that a token adds in the middle of a text: a leading space
is kept, and for a token that is only a part of a character, the bytes of that part.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tilewise.files.reading import Unreadable, refusals_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TokenBytes"]

_UNKNOWN = "\ufffd".encode()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of a tokenizer's tokens, computed once per token. Thread-safe.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._contents: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Bytes of a token; those of U+FFFD for an id that the tokenizer does not know."""
        content = self._contents.get(token)
        if content is None:
            content = self._contents[token] = self._compute(token)
        return content

    def text(self, token: int) -> str:
        """Text of a token; U+FFFD for bytes that are only a part of a character."""
        return self[token].decode("utf-8", "replace")

    def _compute(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return _UNKNOWN
        if "ByteLevel" in self._kinds:
            is_mapped = all(character in _BYTE_OF for character in name)
            return bytes(map(_BYTE_OF.__getitem__, name)) if is_mapped else name.encode()
        if "ByteFallback" in self._kinds and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        try:
            with refusals_of("tokenizers"):
                once, twice = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        except Unreadable:
            return name.encode()
        # The second of two tokens is not the first of its text, so its space is kept.
        return (twice[len(once) :] if twice.startswith(once) else once).encode()

    @cached_property
    def _kinds(self) -> set[str]:
        """Types of the tokenizer's decoders, nested ones included."""
        decoder = self._tokenizer.decoder
        pending: list[dict[str, Any]] = [] if decoder is None else [json.loads(decoder.__getstate__())]
        kinds = set()
        while pending:
            one = pending.pop()
            kinds.add(one["type"])
            pending += one.get("decoders", ())
        return kinds


def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each character that byte-level tokenizers write bytes as: printable Latin-1 characters stand for
    themselves, the other bytes for the characters from U+0100 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
