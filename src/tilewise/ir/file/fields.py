"""The classes of records that a file of one kind may contain, and the types of their fields. Both
are read from the classes.

A record is a dataclass or a named tuple. The set is closed: it contains the classes reachable
through field types, and those in attributes of ops. A file names classes of this set only; names in
a file are never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from tilewise.core.dims import Dim, DimLabel
from tilewise.core.dtypes import DType
from tilewise.ir.graph import Graph
from tilewise.ir.kinds import Kind
from tilewise.ir.program import DeviceBinding

__all__ = [
    "ADDED",
    "DEEPEST",
    "IN_ATTRIBUTES",
    "RENAMED",
    "SharedInts",
    "fields_of",
    "is_record",
    "records_of",
    "settings_of",
]


class SharedInts(NamedTuple):
    """Integers that many records share: they have a row of their own, and are a plain tuple in the
    record.
    """

    items: tuple[int, ...]


RENAMED: Mapping[str, str] = {
    "is_summed_by_leaves": "is_summed_by_batch_splits",
    "reduction_chunks": "k_splits",
}
"""New names of fields, by their names in graph files of earlier versions."""
ADDED: Mapping[str, tuple[str, ...]] = {"Graph": ("frozen",)}
"""By record, its last fields that files of earlier versions do not have; they then have their defaults."""
DEEPEST = 16  # nesting of values without a type; attributes of ops are flat
IN_ATTRIBUTES = (Dim, DimLabel)
"""Records in fields without a type: attributes of ops, keys."""
_SPECIAL: Mapping[tuple[type, str], Any] = {
    (Graph, "constant_values"): Mapping[int, np.ndarray],
    (DeviceBinding, "groups"): tuple[SharedInts, ...],
}


def is_record(hint: Any) -> bool:
    """Whether a type is stored as rows. Dtypes are stored by name."""
    if not isinstance(hint, type) or hint is DType:
        return False
    return is_dataclass(hint) or (issubclass(hint, tuple) and hasattr(hint, "_fields"))


@cache
def fields_of(record: type) -> Mapping[str, Any]:
    """The type of each field, in order."""
    hints = get_type_hints(record)
    named = getattr(record, "_fields", None)
    names = named if named is not None else [f.name for f in fields(record) if f.init]
    return {name: _SPECIAL.get((record, name), hints[name]) for name in names}


def settings_of(kind: type[Kind]) -> list[str]:
    """The names of a kind's fields. The class checks their values itself."""
    return [f.name for f in fields(kind) if f.init] if is_dataclass(kind) else []


@cache
def records_of(root: type) -> Mapping[str, type]:
    """All records, by name, that a file of one class may contain."""
    records: dict[str, type] = {}
    open_ends: list[type] = [root, *IN_ATTRIBUTES]
    while open_ends:
        record = open_ends.pop()
        if records.setdefault(record.__name__, record) is not record:
            raise TypeError(f"two records are called {record.__name__}")
        for hint in fields_of(record).values():
            open_ends += [r for r in _records_in(hint) if r.__name__ not in records]
    return records


def _records_in(hint: Any) -> Iterator[type]:
    if is_record(hint):
        yield hint
    elif get_origin(hint) is not None or get_args(hint):
        for part in get_args(hint):
            yield from _records_in(part)
