"""Typed access to the key-values of a GGUF file. A value of another type is an error that names the
key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.checkpoint.gguf.header import Value
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable

__all__ = ["Metadata"]


@dataclass(frozen=True)
class Metadata:
    """The key-values of a file.

    Attributes:
        values: values by key.
        prefix: what precedes the keys of calls.
    """

    values: Mapping[str, Value]
    prefix: str = ""

    def within(self, prefix: str) -> Metadata:
        """The same values, for keys that begin with `prefix.`."""
        return Metadata(self.values, f"{self.prefix}{prefix}.")

    def get(self, key: str) -> Value | None:
        """A value of any type; None if it is missing."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer. If an array lists it for every layer, all entries must be equal."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer, the same for every layer", value)
        return value

    def token(self, key: str) -> int | None:
        """The id of a token; None if it is missing."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Numbers of 32 bits become the shortest decimal that rounds to them, as
        config.json has it: 1e-05 and not 9.999999747378752e-06.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return decimal(value)

    def truth(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str = "") -> str:
        """A text."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str) -> list[str]:
        """An array of texts; empty if it is missing."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, "an array of texts", value)
        return value

    def numbers(self, key: str) -> np.ndarray[Any, np.dtype[Any]] | None:
        """An array of numbers; None if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            raise self._wrong(key, "an array of numbers", value)
        return value

    def _wrong(self, key: str, rule: str, value: Value | None) -> Unreadable:
        got = "nothing" if value is None else shown(value, 40)
        return Unreadable(f"{self.prefix}{key} must be {rule}; got {got}")


def decimal(value: float) -> float:
    """The shortest decimal that rounds to the same number of 32 bits, if `value` has 32 bits."""
    number = float(value)
    with np.errstate(over="ignore"):
        single = np.float32(number)
    return float(str(single)) if float(single) == number else number
