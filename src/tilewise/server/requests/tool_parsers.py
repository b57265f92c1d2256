"""Parses tool calls in generated text. Each model family has a format, with the name that vLLM
uses. One reader reads all formats.

Text outside of calls is returned as it arrives. Text that may be the beginning of a call is held
back until it is known whether it is; if it is not, it is returned as text. For a call, the name is
returned first, then the arguments as they arrive. A call that is cut off has only the beginning of
its arguments. The result depends on the whole text, not on how it is split into deltas. No
generated text is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewise.server.requests.call_readers import CallReader, JsonCalls, Parsed, PythonCalls, partial_length

__all__ = ["FORMATS", "REQUIRED", "Format", "ToolReader"]


@dataclass(frozen=True)
class Format:
    """The format of a family's calls.

    Attributes:
        openings: opening tags: texts that begin calls.
        reader: makes the reader of the text after an opening tag.
        only_at_start: whether an opening tag counts only at the start of the text.
        shows_special: whether the opening tags are special tokens, so that the text must include
            special tokens.
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
"""Formats by the names of `--tool-call-parser`."""

REQUIRED = Format(("[",), lambda opening: JsonCalls(opening), only_at_start=True)
"""The format of required calls: a JSON list, which a grammar enforces."""


class ToolReader:
    """Splits one growing text into text and calls.

    Args:
        form: the format of calls.
    """

    def __init__(self, form: Format) -> None:
        self._form = form
        self._unread = ""
        self._inside: CallReader | None = None
        self._blanks = ""  # spaces before the opening, which are text if no call follows
        self._is_start = True

    def add(self, text: str) -> Parsed:
        """The parts that are complete now.

        Args:
            text: the new text.
        """
        output: Parsed = []
        if self._inside is not None:
            self._read(self._inside, text, output)
        else:
            self._unread += text
        while self._inside is None and self._unread and self._step(output):
            pass
        return output

    def finish(self) -> Parsed:
        """The last parts, after the text has ended."""
        output: Parsed = []
        if self._inside is not None:
            rest = self._inside.finish(output)
            self._unread = rest if self._inside.has_called else self._blanks + rest
            self._inside = None
        if self._unread:
            output.append(self._unread)
        self._unread = ""
        return output

    def _step(self, output: Parsed) -> bool:
        """Append the next part to `output`. Returns False if no further part is complete."""
        form = self._form
        if form.only_at_start and not self._is_start:
            return self._append(output, len(self._unread))
        text = self._unread.lstrip() if form.only_at_start else self._unread
        places = [(text.find(mark), mark) for mark in form.openings if mark in text]
        places = [one for one in places if one[0] == 0 or not form.only_at_start]
        if places:
            place, mark = min(places)
            before, after = text[:place].rstrip(), text[place + len(mark) :]
            if before:
                output.append(before)
            place += len(self._unread) - len(text)
            self._blanks = self._unread[len(before) : place]
            self._inside, self._is_start, self._unread = form.reader(mark), False, ""
            self._read(self._inside, after, output)
            return True
        num_partial = max(partial_length(text, mark) for mark in form.openings)
        if form.only_at_start:
            is_open = not text or any(mark.startswith(text) for mark in form.openings)
            return False if is_open else self._append(output, len(self._unread))
        return self._append(
            output, len(text[: len(text) - num_partial].rstrip())
        )  # spaces before a call are not text

    def _read(self, inside: CallReader, text: str, output: Parsed) -> None:
        """Give text after an opening tag to its reader, for which the calls may end in this text."""
        ended = inside.add(text, output)
        if ended is not None:
            shown, self._unread = ended
            if not inside.has_called:
                output.append(self._blanks + shown)
            self._inside = None

    def _append(self, output: Parsed, count: int) -> bool:
        if count > 0:
            output.append(self._unread[:count])
            self._unread = self._unread[count:]
            self._is_start = False
        return False
