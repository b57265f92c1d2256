"""Kinds: classes whose objects a plan carries without knowing them, such as optimizers. Plan files
refer to them by name.

A kind is a frozen dataclass that derives from `Kind`. Deriving registers it under its name; a later
definition with the same name replaces it. A name in a file is looked up in this table; reading a
file never imports anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from tilewise.ir.graph import Graph

__all__ = ["Kind", "kind_named"]


class Kind:
    """Base of what a plan carries by name."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.__name__] = cls

    def problems_in(self, graph: Graph) -> Sequence[str]:
        """In words, what of this does not fit a graph that should have been made with it."""
        return ()


_KINDS: WeakValueDictionary[str, type[Kind]] = WeakValueDictionary()


def kind_named(name: str) -> type[Kind] | None:
    """The class that has a name now; None if there is none."""
    return _KINDS.get(name)
