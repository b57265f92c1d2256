"""Splits generated text into reasoning, content and tool calls, incrementally.

A `Reader` reads one text and returns its parts. It does not depend on HTTP. Chunks of streams and
whole messages are both made from these parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.server.requests.call_readers import ArgumentsDelta, Call, partial_length
from tilewise.server.requests.tool_parsers import FORMATS, REQUIRED, ToolReader

__all__ = ["REASONING_PARSERS", "OutputFormat", "Part", "Reader", "merged"]

REASONING_PARSERS = ("qwen3", "deepseek_r1")
"""Names for `--reasoning-parser`: both formats have the reasoning between <think> and </think>."""
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Part:
    """A part of a generated text.

    Attributes:
        kind: `reasoning`, `content`, `call` (the beginning of a call) or `arguments` (the next part of its arguments).
        text: the text of the part; empty for `call`.
        name: name of the called function, for `call`.
        id: the id that the model wrote for a call; empty if it wrote none.
    """

    kind: str
    text: str
    name: str = ""
    id: str = ""


@dataclass(frozen=True)
class OutputFormat:
    """How a text is read.

    Attributes:
        tools: name of the format of tool calls; None if there are no tools.
        thinks: whether reasoning is separated from the text.
        is_thinking: whether the prompt ends inside of reasoning, so that the text begins with
            reasoning.
        function: if not None, the whole text is the arguments of a call of this function.
        calls: whether the text is a list of calls in JSON.
        is_single: whether only the first call is returned.
        has_short_ids: whether calls get ids of nine letters and digits, as Mistral's templates require.
    """

    tools: str | None = None
    thinks: bool = False
    is_thinking: bool = False
    function: str | None = None
    calls: bool = False
    is_single: bool = False
    has_short_ids: bool = False


class Reader:
    """Reads one text.

    Args:
        output_format: how the text is read.
    """

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        calls = None if output_format.tools is None else FORMATS[output_format.tools]
        calls = REQUIRED if output_format.calls else calls
        self._tools = None if calls is None else ToolReader(calls)
        self._state = "before" if output_format.thinks else "text"
        if output_format.thinks and output_format.is_thinking:
            self._state = "thinking"
        self._unread = ""
        self._is_named = False
        self._has_thought = False
        self._num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """Whether the text is inside of reasoning."""
        return self._state == "thinking"

    def add(self, text: str) -> list[Part]:
        """The parts that are complete now.

        Args:
            text: the new text.
        """
        if self._format.function is not None:
            return self._arguments(text)
        parts: list[Part] = []
        text = self._thoughts(text, parts)
        return self._returned([*parts, *self._parts(text)])

    def finish(self) -> list[Part]:
        """The last parts, after the text has ended."""
        unread, self._unread = self._unread, ""
        if self._format.function is not None:
            return self._arguments("")
        parts = [Part("reasoning", unread)] if self._state == "thinking" and unread else []
        if self._state == "before":
            parts = self._parts(unread)
        last = [] if self._tools is None else self._tools.finish()
        return self._returned([*parts, *map(_part, last)])

    def _returned(self, parts: list[Part]) -> list[Part]:
        """The parts that are returned. A list of calls that `max_tokens` cut is not content."""
        if self._format.calls:
            parts = [part for part in parts if part.kind != "content"]
        if not self._format.is_single:
            return parts
        first: list[Part] = []
        for part in parts:
            self._num_calls += part.kind == "call"
            if self._num_calls < 2 or part.kind not in ("call", "arguments"):
                first.append(part)
        return first

    def _arguments(self, text: str) -> list[Part]:
        parts = [] if self._is_named else [Part("call", "", self._format.function or "")]
        self._is_named = True
        return [*parts, Part("arguments", text)] if text else parts

    def _parts(self, text: str) -> list[Part]:
        if self._tools is None:
            return [Part("content", text)] if text else []
        return [_part(parsed) for parsed in self._tools.add(text)]

    def _thoughts(self, text: str, parts: list[Part]) -> str:
        """Append reasoning to `parts`. Returns the text after the reasoning."""
        if self._state == "text":
            return text
        if self._state == "after":
            return self._after_thought(text)
        self._unread += text
        if self._state == "before":
            begun = self._unread.lstrip()
            if not begun or (_OPEN.startswith(begun) and begun != _OPEN):
                return ""
            if not begun.startswith(_OPEN):
                self._state = "text"
                text, self._unread = self._unread, ""
                return text
            self._state, self._unread = "thinking", begun[len(_OPEN) :]
        if not self._has_thought:
            self._unread = self._unread.lstrip("\n")
            self._has_thought = bool(self._unread)
        end = self._unread.find(_CLOSE)
        if end < 0:
            count = len(self._unread) - partial_length(self._unread, _CLOSE)
            if count:
                parts.append(Part("reasoning", self._unread[:count]))
                self._unread = self._unread[count:]
            return ""
        if end:
            parts.append(Part("reasoning", self._unread[:end]))
        text, self._unread, self._state = self._unread[end + len(_CLOSE) :], "", "after"
        return self._after_thought(text)

    def _after_thought(self, text: str) -> str:
        """Drop blank lines between reasoning and text."""
        text = text.lstrip()
        if text:
            self._state = "text"
        return text


def _part(parsed: str | Call | ArgumentsDelta) -> Part:
    if isinstance(parsed, Call):
        return Part("call", "", parsed.name, parsed.id)
    if isinstance(parsed, ArgumentsDelta):
        return Part("arguments", parsed.text)
    return Part("content", parsed)


def merged(parts: Sequence[Part]) -> list[Part]:
    """The parts, where adjacent parts of one kind are merged."""
    result: list[Part] = []
    for part in parts:
        if result and result[-1].kind == part.kind and part.kind in ("reasoning", "content", "arguments"):
            result[-1] = Part(part.kind, result[-1].text + part.text)
        elif part.text or part.kind == "call":
            result.append(part)
    return result
