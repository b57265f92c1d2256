"""Turns rows of a file into records. It trusts nothing in them.

A row refers to earlier rows only, so there are no cycles and one pass is enough. Every value must
have the type of its field. Creating a record also runs the checks of its class. Objects of a kind
must be of a class that this process has defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import DTYPES, DType
from tilewise.core.errors import TilewiseError
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable
from tilewise.ir.file.fields import (
    ADDED,
    DEEPEST,
    IN_ATTRIBUTES,
    RENAMED,
    SharedInts,
    fields_of,
    is_record,
    records_of,
    settings_of,
)
from tilewise.ir.kinds import kind_named

__all__ = ["RowReader"]

_Decode = Callable[[Any], Any]
_INT64 = 1 << 63


class RowReader:
    """Turns rows into records.

    Args:
        root: the class of the whole file.
        classes: name and field names of each class of rows.
        arrays: arrays that rows refer to by number.

    Raises:
        Unreadable: a class is unknown, or has other fields here.
    """

    def __init__(self, root: type, classes: object, arrays: Sequence[NDArray[Any]]) -> None:
        self.objects: list[Any] = []
        self._arrays = arrays
        self._decoders: dict[Any, _Decode] = {}
        self._classes = [self._class(entry, records_of(root)) for entry in _list(classes)]

    def _class(self, entry: object, classes: Mapping[str, type]) -> tuple[type, list[_Decode]]:
        name, names = _list(entry, 2)
        record = classes.get(_text(name))
        if record is None:
            raise Unreadable(f"there is no record class {shown(name)}")
        fields = fields_of(record)
        own = [RENAMED.get(_text(n), n) for n in _list(names)]
        added = ADDED.get(name, ())
        if own != list(fields) and (*own, *added) != (*fields,):
            raise Unreadable(f"a {name} must have the fields {', '.join(fields)}; got {shown(names)}")
        return record, [self._decoder(fields[field]) for field in own]

    def read(self, rows: object) -> Any:
        """The last record, which is the whole file.

        Raises:
            Unreadable: names the first invalid row.
        """
        for number, row in enumerate(_list(rows)):
            try:
                self.objects.append(self._record(_list(row)))
            except (Unreadable, TilewiseError) as error:
                raise Unreadable(f"row {number}: {error}") from None
            except RecursionError:
                raise Unreadable(f"row {number} is nested too deeply") from None
        if not self.objects:
            raise Unreadable("it has no rows")
        return self.objects[-1]

    def _record(self, row: list[Any]) -> Any:
        if not row or type(row[0]) is not int or not 0 <= row[0] < len(self._classes):
            raise Unreadable(f"it must begin with the number of a class; got {shown(row)}")
        record, decoders = self._classes[row[0]]
        if len(row) != len(decoders) + 1:
            raise Unreadable(f"a {record.__name__} must have {len(decoders)} fields; got {len(row) - 1}")
        values = []
        for decode, value in zip(decoders, row[1:]):
            try:
                values.append(decode(value))
            except Unreadable as error:
                name = list(fields_of(record))[len(values)]
                raise Unreadable(f"{name} of a {record.__name__}: {error}") from None
        return record(*values)

    # ---- values by type -----------------------------------------------------------------------------------

    def _decoder(self, hint: Any) -> _Decode:
        if hint not in self._decoders:
            self._decoders[hint] = self._make(hint)
        return self._decoders[hint]

    def _make(self, hint: Any) -> _Decode:
        if hint is SharedInts:
            shared = self._of_record(hint)
            return lambda value: shared(value).items
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
            decoders = [self._decoder(part) for part in parts]
            return lambda value: tuple(d(v) for d, v in zip(decoders, _list(value, len(decoders))))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._of_mapping(*parts)
        return self._of_union(parts)

    def _of_record(self, record: type) -> _Decode:
        objects = self.objects

        def decode(value: Any) -> Any:
            if type(value) is int and 0 <= value < len(objects) and type(objects[value]) is record:
                return objects[value]
            raise Unreadable(f"it must be the number of an earlier {record.__name__}; got {shown(value)}")

        return decode

    def _of_items(self, item: Any) -> _Decode:
        decode = self._decoder(item)
        return lambda value: tuple(map(decode, _list(value)))

    def _of_mapping(self, key: Any, item: Any) -> _Decode:
        decode_key, decode = self._decoder(key), self._decoder(item)

        def mapping(value: Any) -> dict[Any, Any]:
            pairs = [_list(pair, 2) for pair in _list(value)]
            items = {decode_key(k): decode(v) for k, v in pairs}
            if len(items) != len(pairs):
                raise Unreadable(f"a key appears twice in {shown(value)}")
            return items

        return mapping

    def _of_union(self, members: tuple[Any, ...]) -> _Decode:
        rest = [m for m in members if m is not NoneType]
        has_none = len(rest) < len(members)
        record = next((m for m in rest if is_record(m)), None)
        decode = self._decoder(rest[0] if record is None else record)
        if record is None or int not in rest:
            return decode if not has_none else lambda value: None if value is None else decode(value)
        return lambda value: _int(value) if type(value) is int else decode(_list(value, 1)[0])

    def _array(self, value: Any) -> NDArray[Any]:
        if type(value) is not int or not 0 <= value < len(self._arrays):
            raise Unreadable(f"it must be the number of an array; got {shown(value)}")
        return self._arrays[value]

    def _anything(self, value: Any, depth: int = 0) -> Any:
        if value is None:
            return None
        if type(value) is int:
            return _int(value)
        if type(value) is str:
            return _text(value)
        mark, *rest = _list(value) or [None]
        if depth > DEEPEST or type(mark) is not str or len(rest) != (2 if mark == "k" else 1):
            raise Unreadable(f"it must be a value with a mark; got {shown(value)}")
        if mark == "t":
            return tuple(self._anything(v, depth + 1) for v in _list(rest[0]))
        if mark == "m":
            return self._pairs(rest[0], depth)
        if mark == "k":
            return self._kind(rest[0], self._pairs(rest[1], depth))
        if mark == "r":
            records = [r for r in IN_ATTRIBUTES if type(rest[0]) is int and self._is_at(rest[0], r)]
            return self._decoder(records[0] if records else IN_ATTRIBUTES[0])(rest[0])
        if mark not in _MARKED:
            raise Unreadable(f"it must be a value with a mark; got {shown(value)}")
        return _MARKED[mark](rest[0])

    def _is_at(self, number: int, record: type) -> bool:
        return 0 <= number < len(self.objects) and type(self.objects[number]) is record

    def _pairs(self, value: Any, depth: int) -> dict[Any, Any]:
        pairs = [_list(pair, 2) for pair in _list(value)]
        decoded = [(self._anything(k, depth + 1), self._anything(v, depth + 1)) for k, v in pairs]
        if not all(isinstance(k, str | int) for k, _ in decoded) or len(dict(decoded)) != len(pairs):
            raise Unreadable(f"keys must be unique texts or integers; got {shown(value)}")
        return dict(decoded)

    def _kind(self, name: Any, values: Mapping[Any, Any]) -> Any:
        kind = kind_named(_text(name))
        if kind is None:
            raise Unreadable(f"there is no class {shown(name)} here; import the module that defines it first")
        if list(values) != settings_of(kind):
            raise Unreadable(
                f"a {name} must have the settings {', '.join(settings_of(kind))}; got {shown(list(values))}"
            )
        try:
            return kind(**values)
        except TilewiseError:
            raise
        except Exception as error:  # a user's class may raise anything
            raise Unreadable(f"{name} rejects its settings: {shown(error)}") from None


def _list(value: Any, length: int = -1) -> list[Any]:
    if type(value) is not list or (length >= 0 and len(value) != length):
        many = f" of {length}" if length >= 0 else ""
        raise Unreadable(f"it must be a list{many}; got {shown(value)}")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise Unreadable(f"it must be an integer of 64 bits; got {shown(value)}")
    return value


def _ints(value: Any) -> tuple[int, ...]:
    if {*map(type, _list(value))} == {int} and min(value) >= -_INT64 and max(value) < _INT64:
        return tuple(value)
    return tuple(map(_int, value))


def _truth(value: Any) -> bool:
    if type(value) is not int or value not in (0, 1):
        raise Unreadable(f"it must be 0 or 1; got {shown(value)}")
    return value == 1


def _float(value: Any) -> float:
    try:
        number = float.fromhex(value) if type(value) is str else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number.hex() != value:
        raise Unreadable(f"it must be a finite float in hexadecimal; got {shown(value)}")
    return number


def _text(value: Any) -> str:
    if type(value) is not str or not value.isprintable():
        raise Unreadable(f"it must be printable text; got {shown(value)}")
    return value


def _dtype(value: Any) -> DType:
    if type(value) is not str or value not in DTYPES:
        raise Unreadable(f"it must be one of {', '.join(DTYPES)}; got {shown(value)}")
    return DTYPES[value]


_SIMPLE: dict[Any, _Decode] = {int: _int, bool: _truth, float: _float, str: _text, DType: _dtype}
_MARKED: dict[str, _Decode] = {"b": _truth, "f": _float, "d": _dtype}
