"""Calls of tools in what a model writes: a format per family, under vLLM's names, and one reader for all of them.

Text outside of calls is returned as it arrives. Text that may begin a call is held back until it is known whether it
does; text that is not a call is returned as text. Of a call the name is returned first, then its arguments as they
arrive. A call that is cut off has only the beginning of its arguments. The result depends on the whole text, not on how
it is split into deltas. No text that a model writes is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewise.server.requests.call_readers import Call, CallReader, JsonCalls, More, PythonCalls

__all__ = ["FORMATS", "REQUIRED", "Call", "Format", "More", "ToolReader", "held"]


@dataclass(frozen=True)
class Format:
    """How a family writes calls.

    Attributes:
        openings: texts that begin calls.
        reader: of what stands behind one; is given the opening.
        only_at_start: an opening counts only where nothing stands before it.
        shows_special: the openings are special tokens, which a text must not leave out.
    """

    openings: tuple[str, ...]
    reader: Callable[[str], CallReader]
    only_at_start: bool = False
    shows_special: bool = False


FORMATS = {
    "hermes": Format(("<tool_call>",), lambda opening: JsonCalls(opening, closing="</tool_call>")),
    "llama3_json": Format(
        ("<|python_tag|>", "{"), lambda opening: JsonCalls(opening), only_at_start=True, shows_special=True
    ),
    "mistral": Format(
        ("[TOOL_CALLS]",), lambda opening: JsonCalls(opening, has_names=True), shows_special=True
    ),
    "phi4_mini_json": Format(("functools[",), lambda opening: JsonCalls(opening)),
    "pythonic": Format(("[",), PythonCalls, only_at_start=True),
}
"""By the names that `--tool-call-parser` knows."""

REQUIRED = Format(("[",), lambda opening: JsonCalls(opening), only_at_start=True)
"""How a text writes calls that has to: a list of them in JSON, by a grammar."""


def held(text: str, mark: str) -> int:
    """How many characters at a text's end may be the beginning of a mark."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0


class ToolReader:
    """One text as it comes, taken apart into text and calls.

    Args:
        form: how calls are written.
    """

    def __init__(self, form: Format) -> None:
        self._form = form
        self._left = ""
        self._inside: CallReader | None = None
        self._blanks = ""  # before the opening: text, where no call follows
        self._is_start = True

    def add(self, text: str) -> list[str | Call | More]:
        """The parts that are complete now.

        Args:
            text: that came.
        """
        found: list[str | Call | More] = []
        if self._inside is not None:
            self._read(self._inside, text, found)
        else:
            self._left += text
        while self._inside is None and self._left and self._step(found):
            pass
        return found

    def finish(self) -> list[str | Call | More]:
        """The text has ended: what is left."""
        output: list[str | Call | More] = []
        if self._inside is not None:
            rest = self._inside.finish(output)
            self._left = rest if self._inside.has_called else self._blanks + rest
            self._inside = None
        if self._left:
            output.append(self._left)
        self._left = ""
        return output

    def _step(self, found: list[str | Call | More]) -> bool:
        """Return a part of the text; False where nothing more is complete."""
        form = self._form
        if form.only_at_start and not self._is_start:
            return self._tell(found, len(self._left))
        text = self._left.lstrip() if form.only_at_start else self._left
        places = [(text.find(mark), mark) for mark in form.openings if mark in text]
        places = [one for one in places if one[0] == 0 or not form.only_at_start]
        if places:
            place, mark = min(places)
            before, behind = text[:place].rstrip(), text[place + len(mark) :]
            if before:
                found.append(before)
            place += len(self._left) - len(text)
            self._blanks = self._left[len(before) : place]
            self._inside, self._is_start, self._left = form.reader(mark), False, ""
            self._read(self._inside, behind, found)
            return True
        kept = max(held(text, mark) for mark in form.openings)
        if form.only_at_start:
            is_open = not text or any(mark.startswith(text) for mark in form.openings)
            return False if is_open else self._tell(found, len(self._left))
        return self._tell(found, len(text[: len(text) - kept].rstrip()))  # blanks before a call are no text

    def _read(self, inside: CallReader, text: str, output: list[str | Call | More]) -> None:
        """More of what stands behind an opening; perhaps its end."""
        ended = inside.add(text, output)
        if ended is not None:
            shown, self._left = ended
            if not inside.has_called:
                output.append(self._blanks + shown)
            self._inside = None

    def _tell(self, found: list[str | Call | More], count: int) -> bool:
        if count > 0:
            found.append(self._left[:count])
            self._left = self._left[count:]
            self._is_start = False
        return False
