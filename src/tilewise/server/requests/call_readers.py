"""Incremental parsers of the tool calls that follow an opening tag in generated text. Formats are
JSON, a name followed by JSON, or calls in Python's syntax.

A reader looks at each character once. When it is done, it returns the text that was not a call, and
the text that it has not read.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "SHORT_ID",
    "ArgumentsDelta",
    "Call",
    "CallReader",
    "JsonCalls",
    "Parsed",
    "PythonCalls",
    "partial_length",
]

_MOST_HEAD = 1024
_MOST_PYTHON = 1 << 14
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_NAMED = re.compile(r"([\w.-]{1,128})(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
_NAMED_BEGUN = re.compile(r"[\w.-]{1,128}(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?\s*", re.ASCII)
_MARK = "[TOOL_CALLS]"
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
"""Ids of calls in Mistral's models and their templates."""
_ID = re.compile(rf'"id"\s*:\s*"({SHORT_ID.pattern})"')
_BETWEEN = " \t\r\n;,[]"
_NEXT_OUTSIDE, _NEXT_WITHIN = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


@dataclass(frozen=True)
class Call:
    """The beginning of a call.

    Attributes:
        name: name of the called function.
        id: the id that the model wrote; empty if it wrote none.
    """

    name: str
    id: str = ""


@dataclass(frozen=True)
class ArgumentsDelta:
    """The next part of a call's arguments.

    Attributes:
        text: a part of the arguments' JSON.
    """

    text: str


Parsed = list["str | Call | ArgumentsDelta"]
"""Text, and parts of calls."""


def partial_length(text: str, mark: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a mark."""
    most = min(len(text), len(mark) - 1)
    return next((count for count in range(most, 0, -1) if mark.startswith(text[-count:])), 0)


class CallReader(Protocol):
    """Reads the text after an opening tag.

    Attributes:
        has_called: whether a call followed the opening tag.
    """

    has_called: bool

    def add(self, text: str, output: Parsed) -> tuple[str, str] | None:
        """Add text. Complete parts are appended to `output`. Returns None while calls may follow.
        When no more calls can follow, returns the text that was not a call, and the text that was
        not read.
        """
        ...

    def finish(self, output: Parsed) -> str:
        """End the text. Returns the part of it that is not a call."""
        ...


class _Value:
    """Finds the end of a JSON value by its strings and brackets.

    Args:
        depth: number of open brackets.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_text = False
        self._is_escaped = False

    def end(self, text: str, place: int, limit: int) -> int:
        """The index after the value; -1 if the value does not end before `limit`.

        Args:
            text: the text that contains the value.
            place: index of the first character that was not scanned.
            limit: index after the last character to scan.
        """
        if self._is_escaped and place < limit:
            self._is_escaped = False
            place += 1
        while place < limit:
            match = (_NEXT_WITHIN if self._is_text else _NEXT_OUTSIDE).search(text, place, limit)
            if match is None:
                return -1
            place, mark = match.end(), match[0]
            if mark == "\\":
                self._is_escaped = place == limit
                place += 1
            elif mark == '"':
                self._is_text = not self._is_text
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return place
        return -1


class JsonCalls:
    """Objects with the name of a function and its arguments, one after another or in lists.

    Args:
        opening: the opening tag that was read.
        closing: a text that ends the calls wherever it appears; None if there is no such text.
        has_names: whether calls have Mistral's format. There, a name may precede its arguments, and
            the opening tag may precede each call. An object may have an id after its arguments, so
            a call in an object is returned only when the object has ended.
    """

    def __init__(self, opening: str, closing: str | None = None, has_names: bool = False) -> None:
        self._closing, self._has_names = closing, has_names
        is_object = opening == "{"
        self._text = opening  # text after the last returned part
        self._place = 0 if is_object else len(opening)
        self._begin = 0
        self._state = "between"
        self._value = _Value()
        self._is_wrapped = False
        self._pending: Parsed = []  # a call whose object has not ended
        self._tail = ""  # the text after its arguments
        self.has_called = False

    def add(self, text: str, output: Parsed) -> tuple[str, str] | None:
        self._text += text
        return self._read(output, is_over=False)

    def finish(self, output: Parsed) -> str:
        ended = self._read(output, is_over=True)
        self._release(output)
        if ended is not None:
            return "".join(ended)
        return "" if self.has_called else self._text

    def _read(self, output: Parsed, is_over: bool) -> tuple[str, str] | None:
        steps = {
            "between": self._between,
            "object": self._object,
            "value": self._arguments,
            "rest": self._rest,
        }
        while True:
            state, place = self._state, self._place
            ended = steps[state](output, is_over)
            if ended is not None:
                return ended
            if (state, place) == (self._state, self._place):
                return None

    def _between(self, output: Parsed, is_over: bool) -> tuple[str, str] | None:
        """Before a call, or after one."""
        text = self._text
        while self._place < len(text):
            place = self._place
            for mark in (_MARK if self._has_names else None, self._closing):
                if mark is None:
                    continue
                if text.startswith(mark, place):
                    self._place += len(mark)
                    if mark == self._closing:
                        return self._done()
                elif not is_over and mark.startswith(text[place:]):
                    return None
            if self._place > place:
                continue
            if text[place] in _BETWEEN:
                self._place += 1
                continue
            if text[place] == "{":
                self._state, self._begin, self._value = "object", place, _Value()
                return None
            if not self._has_names:
                return self._done()
            named = _NAMED.match(text, place)
            if named is not None:
                self._call(output, named[1], named.end(), is_wrapped=False)
            elif is_over or not _NAMED_BEGUN.fullmatch(text, place):
                return self._done()
            return None
        return None

    def _object(self, output: Parsed, is_over: bool) -> tuple[str, str] | None:
        """Within an object that may be a call."""
        text, begin = self._text, self._begin
        if self._place <= begin + _MOST_HEAD:
            head = _HEAD.match(text[begin : begin + _MOST_HEAD])
            name = None if head is None else _text_of(head[1])
            if head is not None and name is not None:
                self._call(output, name, begin + head.end(), is_wrapped=True)
                return None
        closing = self._find_closing()
        end = self._value.end(text, self._place, len(text) if closing < 0 else closing)
        if end >= 0:
            self._place = end
            try:
                call = _of_value(json.loads(text[begin:end]))
            except (ValueError, RecursionError):
                call = None
            if call is None:
                return self._done()
            self._call(output, call[0], end, is_wrapped=False, id_=call[2] if self._has_names else "")
            output.append(ArgumentsDelta(call[1]))
            self._state = "between"
        elif closing >= 0:
            self._place = closing + len(self._closing or "")
            return self._done()
        else:
            self._place = len(text)
        return None

    def _call(self, output: Parsed, name: str, end: int, is_wrapped: bool, id_: str = "") -> None:
        """Begin a call; its arguments follow."""
        target = self._pending if self._has_names and is_wrapped else output
        target.append(Call(name, id_))
        self._text, self._place = self._text[end:], 0
        self._state, self._value, self._is_wrapped = "value", _Value(), is_wrapped
        self.has_called = True

    def _arguments(self, output: Parsed, is_over: bool) -> tuple[str, str] | None:
        """Within arguments, which are returned as they arrive."""
        text, closing = self._text, self._find_closing()
        limit = (
            closing
            if closing >= 0
            else len(text) - (0 if is_over else partial_length(self._text, self._closing or ""))
        )
        end = self._value.end(text, 0, limit)
        arguments_text = text[: limit if end < 0 else end]
        if arguments_text:
            (self._pending or output).append(ArgumentsDelta(arguments_text))
        if end < 0 and closing >= 0:
            self._place = closing + len(self._closing or "")
            return self._done()
        self._text, self._place = text[len(arguments_text) :], 0
        if end >= 0:
            self._state = "rest" if self._is_wrapped else "between"
            self._value = _Value(depth=1)
        return None

    def _rest(self, output: Parsed, is_over: bool) -> tuple[str, str] | None:
        """After the arguments, within their object."""
        text, closing = self._text, self._find_closing()
        limit = len(text) - partial_length(self._text, self._closing or "") if closing < 0 else closing
        end = self._value.end(text, 0, limit)
        if end < 0 and closing >= 0:
            self._place = closing + len(self._closing or "")
            return self._done()
        passed = limit if end < 0 else end
        if self._pending and len(self._tail) < _MOST_HEAD:
            self._tail += text[:passed]
        self._text, self._place = text[passed:], 0
        if end >= 0:
            self._state = "between"
            self._release(output)
        return None

    def _release(self, output: Parsed) -> None:
        """Return the pending call, if there is one, with its id."""
        if self._pending:
            (call, *parts), written = self._pending, _ID.search(self._tail)
            assert isinstance(call, Call)
            output.append(Call(call.name, written[1] if written else ""))
            output.append(
                ArgumentsDelta("".join(part.text for part in parts if isinstance(part, ArgumentsDelta)))
            )
        self._pending, self._tail = [], ""

    def _find_closing(self) -> int:
        """Index of the closing text; -1 if it has not appeared."""
        if self._closing is None:
            return -1
        return self._text.find(self._closing, max(0, self._place - len(self._closing)))

    def _done(self) -> tuple[str, str]:
        return "" if self.has_called else self._text[: self._place], self._text[self._place :]


def _text_of(written: str) -> str | None:
    """The value of a JSON string; None if the text is not a JSON string."""
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _of_value(value: Any) -> tuple[str, str, str] | None:
    """Name, arguments and id of a call from its object; the id is empty if the object has no id."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    id_ = value.get("id")
    id_ = id_ if isinstance(id_, str) and SHORT_ID.fullmatch(id_) else ""
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in a string
        return value["name"], arguments, id_
    return value["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False), id_


_PYTHON_NAME = re.compile(r"([A-Za-z_][\w.]{0,127})\s*\(", re.ASCII)
_PYTHON_NAME_BEGUN = re.compile(r"(?:[A-Za-z_][\w.]{0,127}\s*)?", re.ASCII)
_PYTHON_KEY = re.compile(r"([A-Za-z_]\w{0,127})\s*=", re.ASCII)
_PYTHON_KEY_BEGUN = re.compile(r"(?:[A-Za-z_]\w{0,127}\s*)?", re.ASCII)
_PYTHON_BETWEEN = re.compile(r"[\s,]*")


class PythonCalls:
    """A list of calls with plain values, such as `[f(a=1), g()]`. Arguments are returned one by
    one.

    Args:
        opening: the bracket that was read.
    """

    def __init__(self, opening: str) -> None:
        self._text = opening  # text after the last returned part
        self._place = len(opening)
        self._state = "name"
        self._name = ""
        self._key = ""
        self._num_returned = 0  # number of returned arguments of the call
        self.has_called = False
        self._scanned = 0
        self._depth = 0
        self._quote = ""

    def add(self, text: str, output: Parsed) -> tuple[str, str] | None:
        self._text += text
        while True:
            state, place, size = self._state, self._place, len(self._text)
            is_done = {"name": self._read_name, "key": self._read_key, "value": self._read_value}[state](
                output
            )
            if is_done:
                return "" if self.has_called else self._text[: self._place], self._text[self._place :]
            if (state, place, size) == (self._state, self._place, len(self._text)):
                return None

    def finish(self, output: Parsed) -> str:
        return "" if self.has_called else self._text

    def _read_name(self, output: Parsed) -> bool:
        self._skip()
        named = _PYTHON_NAME.match(self._text, self._place)
        if named is not None:
            self._name, self._num_returned = named[1], 0
            self._state, self._place = "key", named.end()
            return False
        if self._text.startswith("]", self._place):
            self._place += 1
            return True
        return not _PYTHON_NAME_BEGUN.fullmatch(self._text, self._place)

    def _read_key(self, output: Parsed) -> bool:
        self._skip()
        keyed = _PYTHON_KEY.match(self._text, self._place)
        if keyed is not None:
            self._key = keyed[1]
            self._state, self._place = "value", keyed.end()
            self._scanned, self._depth, self._quote = keyed.end(), 0, ""
            return False
        if self._text.startswith(")", self._place):
            self._append(output, "}" if self._num_returned else "{}", self._place + 1)
            self._state = "name"
            return False
        return not _PYTHON_KEY_BEGUN.fullmatch(self._text, self._place)

    def _read_value(self, output: Parsed) -> bool:
        end = self._value_end()
        if (len(self._text) if end < 0 else end) - self._place > _MOST_PYTHON:
            return True
        if end < 0:
            return False
        try:
            value = ast.literal_eval(self._text[self._place : end].strip())
            arguments_text = (
                f"{json.dumps(self._key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
            )
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return True
        self._append(output, (", " if self._num_returned else "{") + arguments_text, end)
        self._num_returned += 1
        self._state = "key"
        return False

    def _skip(self) -> None:
        """Skip separators of calls and arguments."""
        between = _PYTHON_BETWEEN.match(self._text, self._place)
        assert between is not None
        self._place = between.end()

    def _value_end(self) -> int:
        """The index of the comma or bracket after the value; -1 if the value has not ended."""
        while self._scanned < len(self._text):
            mark = self._text[self._scanned]
            if self._quote:
                if mark == "\\":
                    self._scanned += 1
                elif mark == self._quote:
                    self._quote = ""
            elif mark in "\"'":
                self._quote = mark
            elif mark in "([{":
                self._depth += 1
            elif mark in ")]}" and self._depth:
                self._depth -= 1
            elif not self._depth and mark in ",)]}":
                return self._scanned
            self._scanned += 1
        return -1

    def _append(self, output: Parsed, arguments_text: str, end: int) -> None:
        """Append a part of a call's arguments. Before the first part, append the beginning of the
        call with its name.
        """
        if not self._num_returned:
            output.append(Call(self._name))
            self.has_called = True
        output.append(ArgumentsDelta(arguments_text))
        self._text, self._place = self._text[end:], 0
