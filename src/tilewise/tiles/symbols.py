"""Integers of a traced program that are not known while the function is traced, because they differ
between devices or between iterations of a tile loop.

The function is traced once for all devices that take the same branches. In it, `rank()` and the
index of a tile loop are an `Index`: an expression. It is evaluated later for all devices and
iterations at once, as an array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tilewise.tiles.trace import Tracer

__all__ = [
    "Condition",
    "Env",
    "Index",
    "IndexLike",
    "IntArray",
    "Loop",
    "grid_values",
    "loops_of",
    "values_of",
]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop over tiles.

    Attributes:
        count: number of iterations.
        first: the iteration with which a device starts.
    """

    count: int
    first: IndexLike = 0


@dataclass(frozen=True)
class Env:
    """Values for which an expression is evaluated. Arrays are `[devices]`, or `[devices,
    iterations]` inside of an instruction's own loop.

    Attributes:
        devices: numbers of the devices.
        loops: value of the index of each loop.
    """

    devices: IntArray
    loops: Mapping[Loop, IntArray]


class Index:
    """An integer expression of ranks and loop indices. `+`, `-`, `*`, `//` and `%` give further
    expressions; a comparison gives a `Condition`.

    Args:
        tracer: the trace that it belongs to.
        evaluate: returns the values.
        loops: the tile loops whose indices occur in it.
    """

    __slots__ = ("evaluate", "loops", "tracer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, tracer: Tracer, evaluate: Callable[[Env], IntArray], loops: frozenset[Loop] = frozenset()
    ) -> None:
        self.tracer, self.evaluate, self.loops = tracer, evaluate, loops

    def _with(self, other: object, function: Callable[[Any, Any], Any], divisor: object = None) -> Any:
        if not isinstance(other, int | np.integer | Index) or isinstance(other, bool):
            return NotImplemented
        tracer, line = self.tracer, self.tracer.line() if divisor is not None else None

        def evaluate(env: Env) -> Any:
            if line is not None and np.any(np.equal(values_of(divisor, env), 0)):
                tracer.invalid("a divisor must not be 0", "0 on a device", "check the expression", line)
            return function(self.evaluate(env), values_of(other, env))

        return Index(tracer, evaluate, self.loops | loops_of(other))

    def _compared(self, other: object, function: Callable[[Any, Any], Any]) -> Any:
        index = self._with(other, function)
        return index if index is NotImplemented else Condition(index)

    def __add__(self, other: object) -> Any:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: object) -> Any:
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: object) -> Any:
        return self._with(other, lambda a, b: a * b)

    def __floordiv__(self, other: object) -> Any:
        return self._with(other, lambda a, b: a // b, other)

    def __mod__(self, other: object) -> Any:
        return self._with(other, lambda a, b: a % b, other)

    def __rsub__(self, other: object) -> Any:
        return self._with(other, lambda a, b: b - a)

    def __rfloordiv__(self, other: object) -> Any:
        return self._with(other, lambda a, b: b // a, self)

    def __rmod__(self, other: object) -> Any:
        return self._with(other, lambda a, b: b % a, self)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __lt__(self, other: object) -> Any:
        return self._compared(other, lambda a, b: a < b)

    def __le__(self, other: object) -> Any:
        return self._compared(other, lambda a, b: a <= b)

    def __gt__(self, other: object) -> Any:
        return self._compared(other, lambda a, b: a > b)

    def __ge__(self, other: object) -> Any:
        return self._compared(other, lambda a, b: a >= b)

    def __eq__(self, other: object) -> Any:
        return self._compared(other, lambda a, b: a == b)

    def __ne__(self, other: object) -> Any:
        return self._compared(other, lambda a, b: a != b)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        value = None if self.loops else self.tracer.known_value(self)
        return self._unknown() if value is None else value

    __int__ = __index__

    def __repr__(self) -> str:
        return "Index(...)"

    def _unknown(self) -> NoReturn:
        self.tracer.invalid(
            "an integer that is used here must be known while the program is traced",
            "one that differs between devices or iterations",
            "loop with `for t in tw.comm.tiles(n)`, or use numbers that are equal on all devices",
        )


IndexLike: TypeAlias = "int | Index"


class Condition:
    """A comparison of an `Index`. In an `if`, the function is traced once for the devices on which
    it is true, and once for the others.
    """

    __slots__ = ("index",)

    def __init__(self, index: Index) -> None:
        self.index = index

    def __bool__(self) -> bool:
        return self.index.tracer.decide(self.index)


def values_of(index: object, env: Env) -> Any:
    """The values of an integer or an expression."""
    return index.evaluate(env) if isinstance(index, Index) else index


def loops_of(index: object) -> frozenset[Loop]:
    """The tile loops whose indices occur in an integer or an expression."""
    return index.loops if isinstance(index, Index) else frozenset()


def grid_values(index: object, devices: IntArray) -> IntArray:
    """All values of an integer or an expression, on all of the devices and in all iterations of its loops."""
    loops = list(loops_of(index))
    grid = np.ix_(devices, *(np.arange(loop.count) for loop in loops))
    return np.asarray(values_of(index, Env(grid[0], dict(zip(loops, grid[1:])))))
