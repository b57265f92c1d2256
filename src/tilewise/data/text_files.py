"""Reads text files, whole or in pieces.

A long file is read block by block, so memory holds the text, one block and one piece. A piece ends
at a blank line, or at the end of a line if there is no blank line for long, and never inside a
character. The pieces together are the whole text. Binary files, other encodings and unreadable
files are rejected, each with one word.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from tilewise.files.reading import Unreadable, open_regular

__all__ = ["read_pieces", "read_text"]

_BLOCK_BYTES = 1 << 20
_PIECE_CHARS = 8192
_LONGEST_PIECE_CHARS = 8 * _PIECE_CHARS
_BLANK_LINE = re.compile(r"\n\r?\n")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        Unreadable: with one word: `binary`, `not UTF-8`, `unreadable`.
    """
    return "".join(_blocks(path))


def read_pieces(path: Path) -> list[str]:
    """The text of a file in pieces of about 8 KiB, none of them blank. Joined they are the text.

    Raises:
        Unreadable: as `read_text`; one invalid place makes the whole file invalid.
    """
    pieces: list[str] = []
    rest = ""
    for block in _blocks(path):
        rest += block
        begin = 0
        while len(rest) - begin > _LONGEST_PIECE_CHARS:
            end = _cut(rest, begin)
            pieces.append(rest[begin:end])
            begin = end
        rest = rest[begin:]
    while rest:
        end = _cut(rest, 0)
        pieces.append(rest[:end])
        rest = rest[end:]
    return _join_blank(pieces)


def _cut(text: str, begin: int) -> int:
    """The end of the piece that starts at `begin`; `text` reaches beyond the longest piece, or to
    the end.
    """
    limit = begin + _LONGEST_PIECE_CHARS
    blank = _BLANK_LINE.search(text, begin + _PIECE_CHARS - 2, limit)
    if blank is not None:
        return blank.end()
    if len(text) <= limit:
        return len(text)
    line = text.rfind("\n", begin + _PIECE_CHARS, limit)
    return limit if line < 0 else line + 1


def _join_blank(pieces: list[str]) -> list[str]:
    """Joins blank pieces to the piece before; a blank text has no pieces."""
    joined: list[str] = []
    for piece in pieces:
        if joined and not piece.strip():
            joined[-1] += piece
        else:
            joined.append(piece)
    if joined and not joined[0].strip():
        joined[:2] = ["".join(joined[:2])]
    return [] if joined and not joined[0].strip() else joined


def _blocks(path: Path) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                if b"\0" in block:
                    raise Unreadable("binary")
                yield decode(block)
            yield decode(b"", final=True)
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except OSError:
        raise Unreadable("unreadable") from None
