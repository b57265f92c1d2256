"""Kinds: classes whose objects a plan carries without knowing what they are, such as optimizers.
Plan files refer to these classes by name.

A kind is a frozen dataclass that derives from `Kind`. Deriving registers it under its name; a later
definition with the same name replaces it. A name in a file is looked up in this table; reading a
file never imports anything.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

__all__ = ["Kind", "kind_named"]


class Kind:
    """Base class of objects that a plan carries by name."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.__name__] = cls


_KINDS: WeakValueDictionary[str, type[Kind]] = WeakValueDictionary()


def kind_named(name: str) -> type[Kind] | None:
    """The class registered under a name, or None."""
    return _KINDS.get(name)
