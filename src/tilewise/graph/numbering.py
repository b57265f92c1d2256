"""Numbers values so that equal values have the same number. Then values are compared by their
numbers.
"""

from __future__ import annotations

from copy import deepcopy

__all__ = ["ValueNumbers", "is_equal"]


class ValueNumbers:
    """The values seen so far. Equal values have the same number.

    Values are kept alive, so that the same object is recognized without a comparison. (A model's
    configuration may have a thousand entries.) Values that cannot be hashed are copied, because
    their owner may change them. They are compared one by one.
    """

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[object, int]] = {}
        self._by_value: dict[object, int] = {}
        self._others: list[tuple[object, int]] = []

    def is_known(self, value: object) -> bool:
        """Whether this object has a number."""
        return id(value) in self._by_object

    def number(self, value: object) -> int:
        """The number of a value that can be compared as a whole."""
        entry = self._by_object.get(id(value))
        if entry is not None:
            return entry[1]
        fresh = len(self._by_value) + len(self._others)
        try:
            number = self._by_value.setdefault(value, fresh)
        except TypeError:  # it cannot be hashed
            number = next((n for other, n in self._others if is_equal(other, value)), fresh)
            if number == fresh:
                self._others.append((deepcopy(value), fresh))
            return number
        self._by_object[id(value)] = value, number
        return number


def is_equal(a: object, b: object) -> bool:
    """Whether two attributes are equal; False for values that cannot be compared as a whole, such
    as arrays.
    """
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False
