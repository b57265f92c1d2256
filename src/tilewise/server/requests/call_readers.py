"""Incremental parsers of tool calls after an opening tag: JSON, a name and JSON, or Python calls.

A reader looks at each character once. When it is done it returns the text that was not a call, and the text after it is
read by others.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["SHORT_ID", "Call", "CallReader", "JsonCalls", "More", "PythonCalls"]

_MOST_HEAD = 1024
_MOST_PYTHON = 1 << 14
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_NAMED = re.compile(r"([\w.-]{1,128})(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
_NAMED_BEGUN = re.compile(r"[\w.-]{1,128}(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?\s*", re.ASCII)
_MARK = "[TOOL_CALLS]"
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
"""Ids of calls as Mistral's models write them, and as their templates take them."""
_ID = re.compile(rf'"id"\s*:\s*"({SHORT_ID.pattern})"')
_BETWEEN = " \t\r\n;,[]"
_NEXT_OUTSIDE, _NEXT_WITHIN = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


@dataclass(frozen=True)
class Call:
    """A call begins.

    Attributes:
        name: of the function.
        id: that the model wrote for it; empty where it wrote none.
    """

    name: str
    id: str = ""


@dataclass(frozen=True)
class More:
    """More of the arguments of the call that has begun.

    Attributes:
        text: part of some JSON.
    """

    text: str


Found = list["str | Call | More"]


class CallReader(Protocol):
    """Reads what stands behind an opening.

    Attributes:
        has_called: whether it was the beginning of a call.
    """

    has_called: bool

    def add(self, text: str, found: Found) -> tuple[str, str] | None:
        """More text came; what it makes goes to `found`. Where no call can follow: text that is none, and what is
        left."""
        ...

    def finish(self, found: Found) -> str:
        """All text has come; what of it is no call."""
        ...


class _Value:
    """Where a value of JSON ends: strings and brackets are all that counts.

    Args:
        depth: brackets that are open.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_text = False
        self._is_escaped = False

    def end(self, text: str, place: int, limit: int) -> int:
        """The place behind the value, or -1; all before `limit` has been looked at then.

        Args:
            text: that holds it.
            place: the first that has not been looked at.
            limit: behind the last.
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
    """Objects with the name of a function and its arguments, one behind the other or in lists.

    Args:
        opening: that has come.
        closing: text that ends them, wherever it stands; None: there is none.
        has_names: calls are written as Mistral's models do. A name may stand before its arguments, and the opening
            before each call. An object may hold an id behind its arguments, so a call in an object is returned when
            its object has ended.
    """

    def __init__(self, opening: str, closing: str | None = None, has_names: bool = False) -> None:
        self._closing, self._has_names = closing, has_names
        is_object = opening == "{"
        self._text = opening  # since the last part that was returned
        self._place = 0 if is_object else len(opening)
        self._begin = 0
        self._state = "between"
        self._value = _Value()
        self._is_wrapped = False
        self._held: Found = []  # a call whose object has not ended
        self._tail = ""  # what stands behind its arguments
        self.has_called = False

    def add(self, text: str, found: Found) -> tuple[str, str] | None:
        """More text came."""
        self._text += text
        return self._read(found, is_over=False)

    def finish(self, found: Found) -> str:
        """All text has come."""
        ended = self._read(found, is_over=True)
        self._release(found)
        if ended is not None:
            return "".join(ended)
        return "" if self.has_called else self._text

    def _read(self, found: Found, is_over: bool) -> tuple[str, str] | None:
        steps = {
            "between": self._between,
            "object": self._object,
            "value": self._arguments,
            "rest": self._rest,
        }
        while True:
            state, place = self._state, self._place
            ended = steps[state](found, is_over)
            if ended is not None:
                return ended
            if (state, place) == (self._state, self._place):
                return None

    def _between(self, found: Found, is_over: bool) -> tuple[str, str] | None:
        """Before a call, or behind one."""
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
                self._call(found, named[1], named.end(), is_wrapped=False)
            elif is_over or not _NAMED_BEGUN.fullmatch(text, place):
                return self._done()
            return None
        return None

    def _object(self, found: Found, is_over: bool) -> tuple[str, str] | None:
        """Within an object of which it is not known what it is."""
        text, begin = self._text, self._begin
        if self._place <= begin + _MOST_HEAD:
            head = _HEAD.match(text[begin : begin + _MOST_HEAD])
            name = None if head is None else _text_of(head[1])
            if head is not None and name is not None:
                self._call(found, name, begin + head.end(), is_wrapped=True)
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
            self._call(found, call[0], end, is_wrapped=False, id_=call[2] if self._has_names else "")
            found.append(More(call[1]))
            self._state = "between"
        elif closing >= 0:
            self._place = closing + len(self._closing or "")
            return self._done()
        else:
            self._place = len(text)
        return None

    def _call(self, found: Found, name: str, end: int, is_wrapped: bool, id_: str = "") -> None:
        """It is a call; what is behind its name is next."""
        target = self._held if self._has_names and is_wrapped else found
        target.append(Call(name, id_))
        self._text, self._place = self._text[end:], 0
        self._state, self._value, self._is_wrapped = "value", _Value(), is_wrapped
        self.has_called = True

    def _arguments(self, output: Found, is_over: bool) -> tuple[str, str] | None:
        """Within arguments, which are returned as they arrive."""
        text, closing = self._text, self._find_closing()
        limit = closing if closing >= 0 else len(text) - (0 if is_over else self._num_held())
        end = self._value.end(text, 0, limit)
        arguments_text = text[: limit if end < 0 else end]
        if arguments_text:
            (self._held or output).append(More(arguments_text))
        if end < 0 and closing >= 0:
            self._place = closing + len(self._closing or "")
            return self._done()
        self._text, self._place = text[len(arguments_text) :], 0
        if end >= 0:
            self._state = "rest" if self._is_wrapped else "between"
            self._value = _Value(depth=1)
        return None

    def _rest(self, found: Found, is_over: bool) -> tuple[str, str] | None:
        """Behind the arguments, within their object."""
        text, closing = self._text, self._find_closing()
        limit = len(text) - self._num_held() if closing < 0 else closing
        end = self._value.end(text, 0, limit)
        if end < 0 and closing >= 0:
            self._place = closing + len(self._closing or "")
            return self._done()
        passed = limit if end < 0 else end
        if self._held and len(self._tail) < _MOST_HEAD:
            self._tail += text[:passed]
        self._text, self._place = text[passed:], 0
        if end >= 0:
            self._state = "between"
            self._release(found)
        return None

    def _release(self, found: Found) -> None:
        """Return the held call, if there is one, with its id."""
        if self._held:
            (call, *parts), written = self._held, _ID.search(self._tail)
            assert isinstance(call, Call)
            found.append(Call(call.name, written[1] if written else ""))
            found.append(More("".join(part.text for part in parts if isinstance(part, More))))
        self._held, self._tail = [], ""

    def _find_closing(self) -> int:
        """Where the closing stands, -1 where it does not."""
        if self._closing is None:
            return -1
        return self._text.find(self._closing, max(0, self._place - len(self._closing)))

    def _num_held(self) -> int:
        """Characters at the end that may begin the closing."""
        closing = self._closing or ""
        most = min(len(self._text), len(closing) - 1)
        return next((count for count in range(most, 0, -1) if closing.startswith(self._text[-count:])), 0)

    def _done(self) -> tuple[str, str]:
        return "" if self.has_called else self._text[: self._place], self._text[self._place :]


def _text_of(written: str) -> str | None:
    """A string of JSON."""
    try:
        found = json.loads(written)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _of_value(value: Any) -> tuple[str, str, str] | None:
    """Name, arguments and id of a call, however its object has them; the id is empty where there is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    id_ = value.get("id")
    id_ = id_ if isinstance(id_, str) and SHORT_ID.fullmatch(id_) else ""
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):  # JSON within JSON
        return value["name"], given, id_
    return value["name"], json.dumps({} if given is None else given, ensure_ascii=False), id_


_PYTHON_NAME = re.compile(r"([A-Za-z_][\w.]{0,127})\s*\(", re.ASCII)
_PYTHON_NAME_BEGUN = re.compile(r"(?:[A-Za-z_][\w.]{0,127}\s*)?", re.ASCII)
_PYTHON_KEY = re.compile(r"([A-Za-z_]\w{0,127})\s*=", re.ASCII)
_PYTHON_KEY_BEGUN = re.compile(r"(?:[A-Za-z_]\w{0,127}\s*)?", re.ASCII)
_PYTHON_BETWEEN = re.compile(r"[\s,]*")


class PythonCalls:
    """A list of calls with plain values, `[f(a=1), g()]`; arguments are returned one by one.

    Args:
        opening: the bracket that has come.
    """

    def __init__(self, opening: str) -> None:
        self._text = opening  # since the last part that was returned
        self._place = len(opening)
        self._state = "name"
        self._name = ""
        self._key = ""
        self._num_returned = 0  # arguments of the call
        self.has_called = False
        self._scanned = 0
        self._depth = 0
        self._quote = ""

    def add(self, text: str, found: Found) -> tuple[str, str] | None:
        """More text came."""
        self._text += text
        while True:
            state, place, size = self._state, self._place, len(self._text)
            is_done = {"name": self._read_name, "key": self._read_key, "value": self._read_value}[state](
                found
            )
            if is_done:
                return "" if self.has_called else self._text[: self._place], self._text[self._place :]
            if (state, place, size) == (self._state, self._place, len(self._text)):
                return None

    def finish(self, found: Found) -> str:
        """All text has come."""
        return "" if self.has_called else self._text

    def _read_name(self, found: Found) -> bool:
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

    def _read_key(self, output: Found) -> bool:
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

    def _read_value(self, output: Found) -> bool:
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
        """Pass over what stands between calls and between arguments."""
        between = _PYTHON_BETWEEN.match(self._text, self._place)
        assert between is not None
        self._place = between.end()

    def _value_end(self) -> int:
        """Where the value ends: at a comma or bracket that is none of its own. -1: not yet."""
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

    def _append(self, output: Found, arguments_text: str, end: int) -> None:
        """More of a call's arguments; its name before the first."""
        if not self._num_returned:
            output.append(Call(self._name))
            self.has_called = True
        output.append(More(arguments_text))
        self._text, self._place = self._text[end:], 0
