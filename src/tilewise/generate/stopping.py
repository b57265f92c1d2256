"""Where a text ends because of what it says: stop strings, across the borders of tokens.

What may be the beginning of a stop string is kept back until it is known. The text ends at the first place where any of
the strings is complete (the longest of those that are complete there), so it does not depend on how tokens cut it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopFinder"]


class StopFinder:
    """The stop strings of one growing text.

    Args:
        strings: none of them empty.
        is_included: the string itself is shown.
    """

    def __init__(self, strings: Sequence[str], is_included: bool) -> None:
        self._strings = tuple(strings)
        self._is_included = is_included
        self._kept = ""
        self.found: str | None = None
        """The string that the text has ended with."""

    def add(self, text: str) -> tuple[str, bool]:
        """Take more text; returns what can be shown, and whether the text has ended."""
        text = self._kept + text
        found = [(at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            end, start, self.found = min(found)
            self._kept = ""
            return text[: end if self._is_included else start], True
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was kept back, when no more text comes."""
        text, self._kept = self._kept, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Characters at the end of a text that the string begins with, at most all but one of it."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
