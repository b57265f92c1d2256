"""Makes text from models and servers safe to print on a terminal.

Control characters could move the cursor, hide text or write to the clipboard. They are escaped if
the output is a terminal. Otherwise the text is data and is not changed.
"""

from __future__ import annotations

from typing import TextIO

__all__ = ["escaped", "write_to"]

_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_REORDERING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}  # characters that reorder text
_WRITTEN = {
    **{code: f"\\x{code:02x}" for code in _CONTROLS},
    **{code: f"\\u{code:04x}" for code in _REORDERING},
}


def escaped(text: str) -> str:
    """A text in which control characters, except line ends and tabs, are written as Python escapes.

    Args:
        text: text from outside.
    """
    return text.translate(_WRITTEN)


def write_to(file: TextIO, text: str) -> None:
    """Write text from outside and flush it. The text is escaped if the file is a terminal, and
    otherwise unchanged.

    Args:
        file: standard output or standard error.
        text: text from outside.
    """
    file.write(escaped(text) if file.isatty() else text)
    file.flush()
