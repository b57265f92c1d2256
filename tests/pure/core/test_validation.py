"""Validation of arguments: every value is returned normalized, or is an error in the common form of messages."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.hostile import HOSTILE
from tilewise.core.errors import ConfigError, ShapeError
from tilewise.core.validation import Validator

MESSAGE = re.compile(r"\[core\.call\] it must .+; got .+; .+")
VALIDATE = Validator("core")
FIXED = [*HOSTILE.values(), *map(np.bool_, (0, 1)), np.int8(3), np.float32(0.5), np.array(3)]
ANY = st.one_of(st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4))
CHECKS = {
    "integer": (lambda v: VALIDATE.integer("call", "it", v, -3, 40), lambda r: type(r) is int and -3 <= r <= 40),
    "number": (lambda v: VALIDATE.number("call", "it", v, -3, 40), lambda r: type(r) is float and -3 <= r <= 40),
    "truth": (lambda v: VALIDATE.truth("call", "it", v), lambda r: type(r) is bool),
    "choice": (lambda v: VALIDATE.choice("call", "it", v, ["name", "b"]), lambda r: r in ("name", "b")),
    "instance": (lambda v: VALIDATE.instance("call", "it", v, str, "correct it"), lambda r: type(r) is str),
    "sequence": (lambda v: VALIDATE.sequence("call", "it", v, "ids"), lambda r: not isinstance(r, (str, bytes, dict))),
    "mapping": (lambda v: VALIDATE.mapping("call", "it", v, "ids"), lambda r: all(isinstance(k, str) for k in r)),
    "json": (lambda v: VALIDATE.json("call", "it", v), lambda r: isinstance(r, dict)),
    "path": (lambda v: VALIDATE.path("call", "it", v), lambda r: "\0" not in str(r)),
    "seconds": (lambda v: VALIDATE.seconds("call", "it", v), lambda r: r is None or not math.isnan(r)),
    "patience": (lambda v: VALIDATE.seconds("call", "it", v, is_positive=True), lambda r: r > 0),
    "text": (lambda v: VALIDATE.text("call", "it", v), lambda r: r and r.isprintable()),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
@settings(max_examples=20)
@given(value=ANY)
def test_value_is_valid_or_an_error(name, value):
    """No value raises another exception, and a returned value satisfies the check."""
    check, holds = CHECKS[name]
    for each in (value, *FIXED):
        try:
            result = check(each)
        except ConfigError as error:
            assert MESSAGE.fullmatch(str(error)) and "\n" not in str(error)
        else:
            assert holds(result)


@given(st.integers(-5, 45), st.sampled_from([int, np.int8, np.int64, float, np.float32, str, bool]))
def test_only_integers_in_range_are_accepted(number, kind):
    """NumPy integers become Python's, which do not overflow; floats are not truncated."""
    is_valid = kind in (int, np.int8, np.int64) and -3 <= number <= 40
    try:
        result = VALIDATE.integer("call", "it", kind(number), -3, 40)
    except ConfigError:
        assert not is_valid
    else:
        assert is_valid and type(result) is int and result == number


def test_errors_are_of_the_given_class():
    """The class and the name in messages are the validator's."""
    with pytest.raises(ShapeError, match=r"^\[nn\.call\] a size must divide by 3; got 7 over 3; choose 6$"):
        Validator("nn", ShapeError).require(
            "call", False, "a size", "must divide by 3", "7 over 3", "choose 6"
        )
