"""Turns frozen records into rows of plain values.

Every record becomes one row after the rows that it refers to. Equal records share one row. A row
has the number of its class and then the fields: integers and strings as they are, booleans as 0 and
1, floats in hexadecimal (all bits, no rounding), records by row number, mappings as pairs in order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import DTYPES, DType
from tilewise.core.validation import shown
from tilewise.ir.file.fields import DEEPEST, IN_ATTRIBUTES, SharedInts, fields_of, is_record, settings_of
from tilewise.ir.kinds import Kind, kind_named
from tilewise.ir.program import Instruction

__all__ = ["RowWriter", "Unwritable"]

Plain = Any  # integers, texts, None, and tuples of them
_Encode = Callable[[Any], Plain]
_INT64 = 1 << 63
_STORED = {kind.numpy: name for name, kind in DTYPES.items()}


class Unwritable(ValueError):
    """A value that a file cannot contain; the message names it."""


class RowWriter:
    """The rows of a file under construction.

    Attributes:
        classes: number of each class that has rows.
        rows: rows so far.
        arrays: arrays that rows refer to by number.
    """

    def __init__(self) -> None:
        self.classes: dict[type, int] = {}
        self.rows: list[tuple[Plain, ...]] = []
        self.arrays: list[NDArray[Any]] = []
        self._numbers: dict[tuple[Plain, ...], int] = {}
        # by id; the object is stored too, so that its id is not reused
        self._row_numbers: dict[int, tuple[object, int]] = {}
        self._encoders: dict[Any, _Encode] = {}
        self._array_numbers: dict[tuple[str, tuple[int, ...], bytes], int] = {}

    def add(self, record: object) -> int:
        """The number of a record's row; the row is added if it does not exist.

        Raises:
            Unwritable: a value in the record cannot be stored.
        """
        return self._encoder(type(record))(record)  # type: ignore[no-any-return]

    def _encoder(self, hint: Any) -> _Encode:
        if hint not in self._encoders:
            self._encoders[hint] = self._make(hint)
        return self._encoders[hint]

    def _make(self, hint: Any) -> _Encode:
        if hint is SharedInts:
            return self._shared_ints
        if hint is Instruction:
            return self._of_instruction()
        if is_record(hint):
            return self._of_record(hint)
        if hint in _SIMPLE:
            return _SIMPLE[hint]
        if hint is np.ndarray:
            return self._array
        if hint is Any or hint is object:
            return self._anything
        origin, parts = get_origin(hint), get_args(hint)
        if origin is tuple and parts[-1:] == (...,):
            return _ints if parts[0] is int else self._of_items(parts[0])
        if origin is tuple:
            encoders = [self._encoder(part) for part in parts]
            return lambda value: tuple(e(v) for e, v in zip(encoders, value, strict=True))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            key, item = (self._encoder(part) for part in parts)
            return lambda value: tuple((key(k), item(v)) for k, v in value.items())
        return self._of_union(parts)

    def _of_record(self, record: type) -> _Encode:
        row_numbers, hints = self._row_numbers, fields_of(record)
        names = list(hints)
        fields_in: Callable[[Any], Iterable[Any]] = (
            iter if issubclass(record, tuple) else attrgetter(*names) if len(names) > 1 else _field(*names)
        )
        encoders: list[_Encode] = []

        def encode(value: Any) -> int:
            seen = row_numbers.get(id(value))
            if seen is not None:
                return seen[1]
            if type(value) is not record:
                raise Unwritable(f"the value must be a {record.__name__}; got {shown(value)}")
            if not encoders:  # only now, because records may contain records of their own class
                encoders.extend(self._encoder(hint) for hint in hints.values())
            try:
                row = tuple([e(v) for e, v in zip(encoders, fields_in(value))])
            except Unwritable as error:
                raise Unwritable(f"{error}{_owner(value)}") from None
            number = self._number(record, row)
            row_numbers[id(value)] = value, number
            return number

        return encode

    def _of_instruction(self) -> _Encode:
        """Instructions of a class of devices are often equal, so they are compared before they are
        written.
        """
        encode, row_numbers = self._of_record(Instruction), self._row_numbers
        likely: dict[tuple[object, ...], list[Instruction]] = {}

        def encode_instruction(value: Any) -> int:
            if type(value) is not Instruction or id(value) in row_numbers:
                return encode(value)  # type: ignore[no-any-return]
            alike = likely.setdefault((value.label, value.ints, repr(value.floats)), [])
            for other in alike:
                if other == value:
                    row_numbers[id(value)] = value, row_numbers[id(other)][1]
                    return row_numbers[id(other)][1]
            alike.append(value)
            return encode(value)  # type: ignore[no-any-return]

        return encode_instruction

    def _number(self, record: type, values: tuple[Plain, ...]) -> int:
        row = (self.classes.setdefault(record, len(self.classes)), *values)
        number = self._numbers.setdefault(row, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number

    def _shared_ints(self, value: Any) -> int:
        seen = self._row_numbers.get(id(value))
        if seen is None:
            seen = self._row_numbers[id(value)] = value, self._number(SharedInts, (_ints(value),))
        return seen[1]

    def _of_items(self, item: Any) -> _Encode:
        encode = self._encoder(item)
        if int not in get_args(item):
            return lambda value: tuple(map(encode, value))
        return lambda value: tuple(value) if _are_ints(value) else tuple(map(encode, value))

    def _of_union(self, members: tuple[Any, ...]) -> _Encode:
        """None, an integer or a record. To distinguish it from an integer, a record
        is its row number in a list.
        """
        rest = [m for m in members if m is not NoneType]
        record = next((m for m in rest if is_record(m)), None)
        if record is None:
            encode = self._encoder(rest[0])
            return lambda value: None if value is None else encode(value)
        number = self._encoder(record)
        if int not in rest:
            return lambda value: None if value is None else number(value)

        def encode_union(value: Any) -> Plain:
            if type(value) is int and -_INT64 <= value < _INT64:  # the usual case
                return value
            return None if value is None else _int(value) if isinstance(value, int) else (number(value),)

        return encode_union

    def _array(self, value: Any) -> int:
        if not isinstance(value, np.ndarray) or value.dtype not in _STORED:
            raise Unwritable(
                f"the value must be an array of {', '.join(_STORED.values())}; got {shown(value)}"
            )
        content = np.ascontiguousarray(value)
        key = _STORED[value.dtype], value.shape, content.tobytes()
        number = self._array_numbers.setdefault(key, len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(content)
        return number

    def _anything(self, value: Any, depth: int = 0) -> Plain:
        """A value of a field without a type: it is written with a mark of its type."""
        if value is None or type(value) is int:
            return value if value is None else _int(value)
        if isinstance(value, str):
            return _text(value)
        if depth > DEEPEST:
            raise Unwritable(f"values must be nested at most {DEEPEST} deep; got {shown(value)}")
        if isinstance(value, bool | np.bool_):
            return "b", int(value)
        if isinstance(value, float):
            return "f", _float(value)
        if isinstance(value, IN_ATTRIBUTES):
            return "r", self._encoder(type(value))(value)
        if isinstance(value, DType):
            return "d", _dtype(value)
        if isinstance(value, Kind):
            return self._kind(value, depth)
        if isinstance(value, tuple):
            return "t", tuple(self._anything(item, depth + 1) for item in value)
        if isinstance(value, Mapping):
            return "m", tuple((_key(k), self._anything(v, depth + 1)) for k, v in value.items())
        return _int(value)

    def _kind(self, value: Kind, depth: int) -> Plain:
        name = type(value).__name__
        if kind_named(name) is not type(value):
            raise Unwritable(f"a name must belong to one class; got {name!r}, which another class has")
        settings = settings_of(type(value))
        return "k", name, tuple((n, self._anything(getattr(value, n), depth + 1)) for n in settings)


def _owner(value: Any) -> str:
    """The place of a value, for messages, if it belongs to a record that users know."""
    name = type(value).__name__
    name_fields = {"OpNode": "op", "TensorSpec": "name", "Instruction": "label"}
    return f", in {name} {getattr(value, name_fields[name])!r}" if name in name_fields else ""


def _field(name: str) -> Callable[[Any], tuple[Any]]:
    return lambda value: (getattr(value, name),)


def _key(value: Any) -> Plain:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool | float | tuple):
        raise Unwritable(f"a key must be a text or an integer; got {shown(value)}")
    return _int(value)


def _int(value: Any) -> int:
    if type(value) is int and -_INT64 <= value < _INT64:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise Unwritable(f"the value must be plain data; got {shown(value)}") from None
    if not -_INT64 <= number < _INT64:
        raise Unwritable(f"an integer must have 64 bits; got {shown(value)}")
    return int(number)  # the number of an enumeration's member


def _ints(value: Any) -> Plain:
    return tuple(value) if _are_ints(value) else tuple(map(_int, value))


def _are_ints(value: Any) -> bool:
    """Whether all values are integers, tested quickly."""
    return {*map(type, value)} == {int} and min(value) >= -_INT64 and max(value) < _INT64


def _truth(value: Any) -> int:
    if not isinstance(value, bool | np.bool_):
        raise Unwritable(f"the value must be True or False; got {shown(value)}")
    return int(value)


def _float(value: Any) -> str:
    if not isinstance(value, float) or not math.isfinite(value):
        raise Unwritable(f"the value must be a finite float; got {shown(value)}")
    return float(value).hex()


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise Unwritable(f"the value must be printable text; got {shown(value)}")
    return str(value)


def _dtype(value: Any) -> str:
    if not isinstance(value, DType) or DTYPES.get(value.name) != value:
        raise Unwritable(f"the value must be an element type; got {shown(value)}")
    return value.name


_SIMPLE: dict[Any, _Encode] = {int: _int, bool: _truth, float: _float, str: _text, DType: _dtype}
