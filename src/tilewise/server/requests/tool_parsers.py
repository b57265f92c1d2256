"""Calls of tools in what a model writes: a format per family, under vLLM's names, and one reader for all of them.

Text outside of calls goes through as it comes; what may be the beginning of a call is held back until it is one or not.
What turns out to be no call is text. Nothing a model writes is an error.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["FORMATS", "Call", "Format", "ToolReader", "held"]

_MOST_PYTHON = 1 << 16


@dataclass(frozen=True)
class Call:
    """A call that a model makes.

    Attributes:
        name: of the function.
        arguments: JSON.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class Format:
    """How a family writes calls.

    Attributes:
        openings: texts that begin calls.
        read: calls of the text from an opening on; none where it is something else.
        closing: text that ends them; None: the end of all.
        only_at_start: an opening counts only where nothing stands before it.
        shows_special: the openings are special tokens, which a text must not leave out.
    """

    openings: tuple[str, ...]
    read: Callable[[str], list[Call]]
    closing: str | None = None
    only_at_start: bool = False
    shows_special: bool = False


def _of_value(value: Any) -> Call | None:
    """A call as most families write it, in JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):  # written twice
        return Call(value["name"], given)
    return Call(value["name"], json.dumps({} if given is None else given, ensure_ascii=False))


def _json_values(text: str) -> list[Any]:
    """Values of JSON one behind the other, with blanks or semicolons between them; none where there is other text."""
    found, place, decoder = [], 0, json.JSONDecoder()
    while place < len(text):
        if text[place] in " \t\r\n;":
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        found.append(value)
    return found


def _calls(values: list[Any]) -> list[Call]:
    """Calls of values, all of them or none."""
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    found = [_of_value(value) for value in flat]
    return [call for call in found if call is not None] if all(found) else []


def _read_hermes(text: str) -> list[Call]:
    return _calls(_json_values(text.removeprefix("<tool_call>").removesuffix("</tool_call>")))


def _read_llama(text: str) -> list[Call]:
    return _calls(_json_values(text.removeprefix("<|python_tag|>")))


def _read_mistral(text: str) -> list[Call]:
    found: list[Call] = []
    for part in text.split("[TOOL_CALLS]"):
        named = re.match(r"\s*([\w.-]+)(?:\[ARGS\])?\s*(?=\{)", part)
        if named is not None:
            values = _json_values(part[named.end() :])
            found += [Call(named[1], json.dumps(value, ensure_ascii=False)) for value in values[:1]]
        else:
            found += _calls(_json_values(part))
    return found


def _read_phi(text: str) -> list[Call]:
    return _calls(_json_values(text.removeprefix("functools")))


def _read_python(text: str) -> list[Call]:
    """A list of calls with plain values, `[f(a=1), g()]`."""
    if len(text) > _MOST_PYTHON:
        return []
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> Call:
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("no call by name")
    given = {str(key.arg): ast.literal_eval(key.value) for key in call.keywords}
    return Call(ast.unparse(call.func), json.dumps(given, ensure_ascii=False))


FORMATS = {
    "hermes": Format(("<tool_call>",), _read_hermes, "</tool_call>"),
    "llama3_json": Format(("<|python_tag|>", "{"), _read_llama, only_at_start=True, shows_special=True),
    "mistral": Format(("[TOOL_CALLS]",), _read_mistral, shows_special=True),
    "phi4_mini_json": Format(("functools[",), _read_phi),
    "pythonic": Format(("[",), _read_python, only_at_start=True),
}
"""By the names that `--tool-call-parser` knows."""


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
        self._is_inside = False
        self._is_start = True

    def add(self, text: str) -> list[str | Call]:
        """What can be told now.

        Args:
            text: that came.
        """
        self._left += text
        found: list[str | Call] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[str | Call]:
        """The text has ended: what is left."""
        left, self._left = self._left, ""
        if not self._is_inside:
            return [left] if left else []
        self._is_inside = False
        return self._read(left)

    def _step(self, found: list[str | Call]) -> bool:
        """Tell of a part of what is there; False: nothing more can be told."""
        form = self._form
        if self._is_inside:
            end = -1 if form.closing is None else self._left.find(form.closing)
            if end < 0:
                return False
            end += len(form.closing or "")
            inside, self._left = self._left[:end], self._left[end:]
            found += self._read(inside)
            self._is_inside = False
            return bool(self._left)
        if form.only_at_start and not self._is_start:
            return self._tell(found, len(self._left))
        text = self._left.lstrip() if form.only_at_start else self._left
        places = [place for place in (text.find(mark) for mark in form.openings) if place >= 0]
        places = [0] * (0 in places) if form.only_at_start else places
        if places:
            before, self._left = text[: min(places)], text[min(places) :]
            if before.strip():
                found.append(before)
            self._is_inside, self._is_start = True, False
            return True
        kept = max(held(text, mark) for mark in form.openings)
        if form.only_at_start:
            is_open = not text or any(mark.startswith(text) for mark in form.openings)
            return False if is_open else self._tell(found, len(self._left))
        if not text[: len(text) - kept].strip():  # blanks before a call are no text
            return False
        return self._tell(found, len(self._left) - kept)

    def _read(self, text: str) -> list[str | Call]:
        """Calls, or the text that is none."""
        calls = self._form.read(text)
        return [*calls] if calls else [text] if text else []

    def _tell(self, found: list[str | Call], count: int) -> bool:
        if count > 0:
            found.append(self._left[:count])
            self._left = self._left[count:]
            self._is_start = False
        return False
