"""Validation of the arguments of public calls, and the one form of error messages.

Every message is `[package.call] rule; got X; what to do`. The checks cover what Python would accept
and then compute a wrong result with: a boolean as a number, NaN as a rate, a string as a list. Each
package makes one `Validator` with its name and its error class. Values are not converted. Errors
are raised before any work starts.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from os import fsencode
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from tilewise.core.errors import ConfigError, TilewiseError

__all__ = ["Validator", "bare", "cut", "nearest", "shown"]

MAX_SHOWN = 80
_LONGEST_S = 1e9  # the longest wait: about 30 years

T = TypeVar("T")


def cut(text: str, limit: int) -> str:
    """The beginning of a text, at most `limit` characters long. It ends with a whole word and an ellipsis; if the
    second half has no space, as in a very long name, it ends within a word."""
    if len(text) <= limit:
        return text
    head = text[:limit]
    place = max(head.rfind(" "), head.rfind("\n"))
    return f"{head[:place].rstrip()}…" if place > limit // 2 else f"{head[: limit - 1]}…"


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A value in an error message: one short line, even if the value's `__repr__` fails."""
    try:
        written = " ".join(repr(value).split())
    except Exception:  # the caller's error matters, not that of __repr__
        return f"an object of type {type(value).__name__}"
    if len(written) > limit:
        return f"{cut(written, limit)} (of type {type(value).__name__})"
    return written


def bare(value: object, limit: int = MAX_SHOWN) -> str:
    """Like `shown`, but text has no quotes. For names and values from outside: control characters are escaped."""
    return cut(repr(value)[1:-1], limit) if isinstance(value, str) else shown(value, limit)


def nearest(name: str, names: Collection[str], likeness: float = 0.6) -> str | None:
    """The known name that an unknown name most likely means, or None.

    Names whose words begin with all words of the unknown name come first, the shortest before the others: `dir` is
    `directory`, `num_heads` is `num_attention_heads`. Next are names that the unknown name begins with: `batch_size`
    is `batch`. Then the most similar spelling counts.

    Args:
        name: the unknown name.
        names: the known names.
        likeness: the minimum similarity of two spellings, as `difflib.get_close_matches` measures it.
    """
    words = name.lower().split("_")
    longer = [n for n in names if _begin_words(words, n.split("_"))] if min(map(len, words)) > 1 else []
    if longer:
        return min(longer, key=lambda n: (n.count("_"), len(n)))
    if shorter := [n for n in names if name.startswith(f"{n}_")]:
        return max(shorter, key=len)
    return next(iter(get_close_matches(name, names, 1, likeness)), None)


def _begin_words(beginnings: list[str], words: list[str]) -> bool:
    """Whether each beginning begins a word, in the same order."""
    left = iter(words)
    return all(any(word.startswith(beginning) for word in left) for beginning in beginnings)


@dataclass(frozen=True)
class Validator:
    """Validates the arguments of one package's public calls.

    Args:
        package: its name in messages.
        error: the class of the errors that are raised.
    """

    package: str
    error: type[TilewiseError] = ConfigError

    def invalid(self, call: str, rule: str, got: str, advice: str) -> NoReturn:
        """Raise the package's error."""
        raise self.error(f"[{self.package}.{call}] {rule}; got {got}; {advice}")

    def require(self, call: str, holds: bool, name: str, rule: str, got: object, advice: str) -> None:
        """Raise the package's error unless `holds`; `got` is the value of the field `name`, or text about it."""
        if not holds:
            text = " ".join(got.split()) if isinstance(got, str) else shown(got)
            self.invalid(call, f"{name} {rule}", text, advice)

    def integer(self, call: str, name: str, value: Any, low: int, high: int) -> int:
        """An integer in [low, high]. Truth values and arrays are invalid."""
        if type(value) is int and low <= value <= high:
            return value
        try:
            number = None if isinstance(value, (bool, np.bool_, np.ndarray)) else operator.index(value)
        except TypeError:
            number = None
        if number is None:
            self.invalid(call, f"{name} must be an integer", shown(value), "pass a whole number")
        if not low <= number <= high:
            self.invalid(call, f"{name} must lie in [{low}, {high}]", shown(value), "correct it")
        return number

    def number(
        self, call: str, name: str, value: Any, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """A finite number in [low, high]. Truth values, strings and arrays are invalid."""
        try:
            is_real = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
            number = float(value) if is_real else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.invalid(call, f"{name} must be a finite number", shown(value), "pass a float")
        if not low <= number <= high:
            self.invalid(call, f"{name} must lie in [{low:g}, {high:g}]", shown(value), "correct it")
        return number

    def truth(self, call: str, name: str, value: Any) -> bool:
        """True or False, also NumPy's."""
        if not isinstance(value, (bool, np.bool_)):
            self.invalid(call, f"{name} must be True or False", shown(value), "correct it")
        return bool(value)

    def choice(self, call: str, name: str, value: Any, choices: Collection[str]) -> str:
        """One of some names."""
        if not isinstance(value, str) or value not in choices:
            self.invalid(
                call, f"{name} must be one of {', '.join(choices)}", shown(value), "choose one of them"
            )
        return value

    def instance(self, call: str, name: str, value: Any, kind: type[T], advice: str) -> T:
        """An object of a class."""
        if not isinstance(value, kind):
            self.invalid(call, f"{name} must be a {kind.__name__}", shown(value), advice)
        return value

    def without_mask(self, call: str, name: str, *values: Any) -> None:
        """Reject arrays with masked elements, because code without support for masks reads the values below them."""
        odd = (value for value in values if isinstance(value, np.ndarray) and type(value) is not np.ndarray)
        if any(np.ma.is_masked(value) for value in odd):  # np.ma is imported on first use
            self.invalid(call, f"{name} must be an array without a mask", "masked elements", "fill them")

    def sequence(
        self, call: str, name: str, value: Any, what: str, *, in_any_order: bool = False
    ) -> Sequence[Any]:
        """A list, a tuple, or another collection that can be iterated repeatedly, in the same order in every process.
        A set is valid only with `in_any_order`."""
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return value
        is_set = isinstance(value, (set, frozenset)) and not in_any_order
        if isinstance(value, Collection) and not is_set and not isinstance(value, (str, bytes, Mapping)):
            with suppress(TypeError):  # an array without dimensions
                return list(value)
        self.invalid(call, f"{name} must be a sequence of {what}", shown(value), "pass a list or a tuple")

    def mapping(self, call: str, name: str, value: Any, what: str) -> Mapping[str, Any]:
        """A dictionary whose keys are names."""
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            self.invalid(
                call, f"{name} must be a dictionary from names to {what}", shown(value), "pass a dict"
            )
        return value

    def json(self, call: str, name: str, value: Any) -> Mapping[str, Any]:
        """A dictionary that is unchanged after encoding it as JSON in UTF-8 and decoding it."""
        values = self.mapping(call, name, value, "what JSON can hold")
        try:
            plain = json.loads(json.dumps(values, allow_nan=False, ensure_ascii=False).encode("utf-8"))
            is_same = bool(plain == values)
        except (TypeError, ValueError, RecursionError):
            is_same = False
        if not is_same:
            self.invalid(call, f"{name} must be what JSON can hold", shown(values), "convert it")
        return values

    def function(self, call: str, name: str, value: Any) -> None:
        """A callable, or None."""
        if value is not None and not callable(value):
            self.invalid(call, f"{name} must be a function", shown(value), "pass one, or None")

    def path(self, call: str, name: str, value: Any) -> Path:
        """A valid name of a file or directory, which need not exist."""
        try:
            is_path = not isinstance(value, bytes) and b"\0" not in fsencode(value)
        except (TypeError, UnicodeEncodeError):
            is_path = False
        if not is_path:
            self.invalid(call, f"{name} must be a path", shown(value), "pass a str or a Path")
        return Path(value)

    def seconds(self, call: str, name: str, value: Any, *, is_positive: bool = False) -> float | None:
        """A time in seconds, possibly infinite, or None. NaN is invalid, because no comparison with it holds."""
        if value is None and not is_positive:
            return None
        is_real = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
        if not is_real or math.isnan(value):
            self.invalid(call, f"{name} must be a number of seconds", shown(value), "pass a float")
        if is_positive and value <= 0:
            self.invalid(call, f"{name} must be more than 0 seconds", shown(value), "pass 10.0")
        return float(min(max(value, -_LONGEST_S), _LONGEST_S))

    def text(self, call: str, name: str, value: Any) -> str:
        """Printable text that is not empty, such as a name."""
        if not isinstance(value, str) or not value or not value.isprintable():
            self.invalid(call, f"{name} must be printable text", shown(value), "pass a str")
        return value
