"""Hostile argument values by name, and which of them a call accepts.

Used by the tests that try every argument of every public call: a rejected value must raise the
project's own error, and an accepted one is listed in the test's table, so that a missing check
shows as a newly accepted value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewise.core.dims import Dim, DimLabel
from tilewise.core.errors import TilewiseError
from tilewise.graph import GraphBuilder


class Odd:
    """An object whose text cannot be made and that equals nothing."""

    def __repr__(self):
        raise RuntimeError("no text")

    def __eq__(self, other):
        raise TypeError("no comparison")

    __hash__ = None


HOSTILE: dict[str, Any] = {
    "None": None, "True": True, "-1": -1, "0": 0, "2**70": 1 << 70, "2.5": 2.5, "nan": float("nan"),
    "inf": float("inf"), "1j": 1j, "''": "", "'x\\0y'": "x\0y", "'name'": "name", "bytes": b"bytes", "()": (), "[]": [],
    "[[1], 2]": [[1], 2], "{}": {}, "{'a': 1}": {"a": 1}, "object": object(), "odd": Odd(), "float32": np.float32(2),
    "array": np.zeros(3), "objects": np.zeros((2, 2), object), "class": int, "function": lambda: None,
    "Dim": Dim("n", 1, 4), "DimLabel": DimLabel("mlp"),
    "their tensor": GraphBuilder("other").input([4, 8], name="theirs"),
}  # fmt: skip


FROM_JSON = [v for v in HOSTILE.values() if v is None or type(v) in (bool, int, float, str, list, dict)]
INVALID = (TilewiseError, TypeError, AttributeError, ValueError, LookupError, OverflowError)
"""What an invalid argument raises: an error of the project, or the one of Python or NumPy at a wrong type."""


def accepted(call: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, set[str]]:
    """Which hostile values a call accepts for each argument; arguments that accept none are left
    out.

    Raises:
        Exception: any error of the call that is not one of the project's.
    """
    call(**arguments)  # the arguments are valid
    taken = {argument: set() for argument in arguments}
    for argument in arguments:
        for name, value in HOSTILE.items():
            try:
                call(**{**arguments, argument: value})
            except INVALID as error:
                assert not isinstance(error, TilewiseError) or "\n" not in str(error), (argument, name)
            else:
                taken[argument].add(name)
    return {argument: names for argument, names in taken.items() if names}
