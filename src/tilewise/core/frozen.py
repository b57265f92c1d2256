"""`FrozenMap`: a dictionary that cannot be changed, for frozen records.

It is a `dict`, so reading it costs the same, and `dataclasses.asdict`, `json` and copies accept it.
Changing it raises an error; `dict(frozen_map)` is a copy that can be changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from tilewise.core.validation import Validator

__all__ = ["FrozenMap", "freeze_maps"]

K = TypeVar("K")
V = TypeVar("V")

_validate = Validator("core")


class FrozenMap(dict[K, V]):
    """A read-only mapping of a frozen record. It equals any dictionary with the same keys and
    values.

    Raises:
        ConfigError: an attempt to change it.
    """

    __slots__ = ()

    def _read_only(self, *arguments: object, **named: object) -> NoReturn:
        _validate.invalid(
            "FrozenMap",
            "mappings of frozen records are read-only",
            f"a change of one with {len(self)} entries",
            "change dict(mapping), and make a new record with it",
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _read_only

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain dictionary, from which a `FrozenMap` is made."""
        return FrozenMap, (dict(self),)


def freeze_maps(record: object, *names: str) -> None:
    """For `__post_init__` of a frozen dataclass: replace mappings in its fields by read-only ones."""
    for name in names:
        mapping: Mapping[Any, Any] = getattr(record, name)
        if type(mapping) is not FrozenMap:
            object.__setattr__(record, name, FrozenMap(mapping))
