"""Records an optimizer's arithmetic as a program of steps.

An optimizer's `update` is called with symbolic values, and its arithmetic on them is recorded. The
result is the program of the `update` op (`graph.ops.update`), which native code runs in one pass
over weight, states and gradient. All arithmetic is fp32 with one rounding per operation. `fused(a,
b, c)` is `a * b + c` with a single rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from tilewise.core.dtypes import MAX_F32
from tilewise.core.validation import Validator, shown
from tilewise.kernels import REFERENCES, UPDATE_STEPS

__all__ = [
    "Parameter",
    "Program",
    "Value",
    "absolute",
    "fused",
    "maximum",
    "minimum",
    "record_update",
    "sign",
    "sqrt",
]

KINDS = (
    "add",
    "subtract",
    "multiply",
    "divide",
    "fused",
    "sqrt",
    "negate",
    "absolute",
    "sign",
    "maximum",
    "minimum",
)
_KINDS = list(UPDATE_STEPS)
_MAX_STEPS = 256
_OF_NUMPY: dict[object, str] = {
    np.add: "add",
    np.subtract: "subtract",
    np.multiply: "multiply",
    np.divide: "divide",
}
_validate = Validator("optim")


@dataclass(frozen=True)
class Program:
    """The update of a parameter as the `update` op takes it.

    Attributes:
        steps: steps of four integers: an index in `kernels.UPDATE_STEPS`, and the numbers of three
            values.
        constants: numbers that are equal in every step of training.
        left: the numbers of the final values of the weight and of each state.
    """

    steps: tuple[int, ...]
    constants: tuple[float, ...]
    left: tuple[int, ...]


class _Tape:
    def __init__(self, num_inputs: int) -> None:
        self.num_inputs = num_inputs  # weight, states, gradient, hyper-parameters
        self.constants: list[float] = []
        self.steps: list[tuple[int, tuple[object, ...]]] = []

    def number(self, value: Value) -> int:
        kind, index = value.place
        first = {"input": 0, "constant": self.num_inputs, "step": self.num_inputs + len(self.constants)}[kind]
        return first + index

    def append(self, kind: str, *operands: Value | float) -> Value:
        values = [self.value(o) for o in operands]
        if len(self.steps) >= _MAX_STEPS:
            _validate.invalid("rule", f"an update may have at most {_MAX_STEPS} steps", "more", "simplify it")
        self.steps.append((_KINDS.index(kind), (*values, *[values[0]] * (3 - len(values)))))
        return Value(self, ("step", len(self.steps) - 1))

    def value(self, operand: Value | float) -> Value:
        if isinstance(operand, Value):
            if operand.tape is not self:
                _validate.invalid(
                    "rule", "values must belong to one parameter", "another's", "use this update's own"
                )
            return operand
        number = _validate.number("rule", "a constant", operand, -MAX_F32, MAX_F32)
        if number not in self.constants:
            self.constants.append(number)
        return Value(self, ("constant", self.constants.index(number)))


def _unsupported(what: str) -> NoReturn:
    _validate.invalid(
        "rule",
        "an update may use only +, -, *, /, absolute, fused, maximum, minimum, sign and sqrt (tilewise.optim.rule)",
        what,
        "write it with these",
    )


def _method_that_raises(what: str) -> Callable[..., NoReturn]:
    """A method that raises, for an operator that programs do not support."""

    def invalid(*operands: object) -> NoReturn:
        _unsupported(what)

    return invalid


class Value:
    """A symbolic number per element of the parameter. Operators and the functions of this module
    make new values.
    """

    def __init__(self, tape: _Tape, place: tuple[str, int]) -> None:
        self.tape, self.place = tape, place

    def __repr__(self) -> str:
        return "a value of an update"

    def __array_ufunc__(self, function: np.ufunc, method: str, *operands: object, **options: object) -> Value:
        """Supports operators with NumPy numbers on the left; NumPy's functions are rejected."""
        kind = _OF_NUMPY.get(function) if method == "__call__" and not options else None
        if kind is None:
            _unsupported(f"numpy.{function.__name__}")
        return _append(kind, *operands)  # type: ignore[arg-type]  # rejects operands that are not numbers

    def __add__(self, other: Value | float) -> Value:
        return self.tape.append("add", self, other)

    def __radd__(self, other: float) -> Value:
        return self.tape.append("add", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return self.tape.append("subtract", self, other)

    def __rsub__(self, other: float) -> Value:
        return self.tape.append("subtract", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return self.tape.append("multiply", self, other)

    def __rmul__(self, other: float) -> Value:
        return self.tape.append("multiply", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return self.tape.append("divide", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return self.tape.append("divide", other, self)

    def __neg__(self) -> Value:
        return self.tape.append("negate", self)

    def __bool__(self) -> bool:
        _validate.invalid(
            "rule",
            "an update must be the same for every element",
            "a condition on an element",
            "use maximum, minimum or sign",
        )


# Python compares any two objects, and NumPy makes an array of any object, so these operations must raise explicitly.
# Other operators that are not defined here raise Python's TypeError.
for _what, _names in {"==": "eq", "!=": "ne", "a function of NumPy": "array array_function"}.items():
    for _name in _names.split():
        setattr(Value, f"__{_name}__", _method_that_raises(_what))


def _append(kind: str, *operands: Value | float) -> Value:
    """Append a step to the program that an operand belongs to."""
    for operand in operands:
        if isinstance(operand, Value):
            return operand.tape.append(kind, *operands)
    _validate.invalid(
        "rule",
        f"{kind} needs a value of the update's parameter",
        ", ".join(shown(o) for o in operands),
        "compute constants with math",
    )


def fused(a: Value | float, b: Value | float, c: Value | float) -> Value:
    """`a * b + c`, rounded once.

    Raises:
        ConfigError: no argument is a symbolic value (the same for all functions here).
    """
    return _append("fused", a, b, c)


def sqrt(x: Value) -> Value:
    """The square root."""
    return _append("sqrt", x)


def absolute(x: Value) -> Value:
    """`|x|`."""
    return _append("absolute", x)


def sign(x: Value) -> Value:
    """-1, 0 or 1; NaN stays."""
    return _append("sign", x)


def maximum(a: Value | float, b: Value | float) -> Value:
    """The larger of two."""
    return _append("maximum", a, b)


def minimum(a: Value | float, b: Value | float) -> Value:
    """The smaller of two."""
    return _append("minimum", a, b)


class _Named(dict[str, Value]):
    """Values by the names that an optimizer declares."""

    def __missing__(self, name: object) -> NoReturn:
        _validate.invalid(
            "rule",
            "an update may use only the states and hyper-parameters that its optimizer declares",
            f"{shown(name)}; declared: {', '.join(self) or 'none'}",
            "declare it in `states` or `per_step`",
        )


class Parameter:
    """The argument of an optimizer's `update`: one parameter with its gradient and states.

    Attributes:
        weight: the weight before the step. Assign its new value.
        gradient: the weight's gradient, scaled down by clipping.
        states: the optimizer states by name. Assign their new values.
        hyper: hyper-parameters that change from step to step, by name.
    """

    def __init__(self, tape: _Tape, states: Sequence[str], hyper: Sequence[str]) -> None:
        values = iter(Value(tape, ("input", i)) for i in range(tape.num_inputs))
        self.weight = next(values)
        self.states = _Named({name: next(values) for name in states})
        self.gradient = next(values)
        self.hyper = _Named({name: next(values) for name in hyper})


def _left(parameter: Parameter, states: Sequence[str]) -> list[Value]:
    """The final values of the weight and of the states, in order."""
    weight, left_states = (getattr(parameter, name, None) for name in ("weight", "states"))
    odd = f"states = {shown(left_states)}"
    if isinstance(left_states, dict) and list(left_states) == list(states):
        left = [("weight", weight), *left_states.items()]
        odd = ", ".join(f"{name} = {shown(v)}" for name, v in left if not isinstance(v, Value))
        if not odd:
            return [value for _, value in left]
    _validate.invalid(
        "rule",
        f"an update must leave a value in the weight and every state ({', '.join(states) or 'none'})",
        odd,
        "assign them",
    )


def record_update(
    update: Callable[[Parameter], None], states: Sequence[str], hyper: Sequence[str]
) -> Program:
    """Record the program of an update.

    Raises:
        ConfigError: the update does something that a program cannot express. Or it would change
            elements that are zero and have no gradient; this is rejected because padding must stay
            zero.
    """
    tape = _Tape(2 + len(states) + len(hyper))
    parameter = Parameter(tape, states, hyper)
    update(parameter)
    values = [tape.value(v) for v in _left(parameter, states)]
    steps = [n for kind, operands in tape.steps for n in (kind, *(tape.number(o) for o in operands))]  # type: ignore[arg-type]
    program = Program(tuple(steps), tuple(tape.constants), tuple(tape.number(v) for v in values))
    zeros = [np.zeros((1, 1))] * (len(states) + 2)
    moved = REFERENCES["update"](
        zeros, np.full((1, len(hyper)), 0.5), 1.0, program.steps, program.constants, program.left
    )
    if any(float(array[0, 0]) != 0.0 for array in moved):
        _validate.invalid(
            "rule",
            "a weight of zero must stay zero without gradient and states, because padding must stay zero",
            "an update that moves it",
            "let it depend on them",
        )
    return program
