"""What processes compare when they meet, and how a difference is said."""

import sys

import pytest

from tilewise.comm.facts import own_command, require_equal
from tilewise.core import ConfigError


def refusal(own, other):
    """What is said of a command that differs."""
    with pytest.raises(ConfigError) as refused:
        require_equal({"command": own}, {"command": other}, "process 1")
    return str(refused.value)


def test_the_command_is_what_a_shell_would_take(monkeypatch):
    """The folder of the program, which hosts may spell differently, is no part of it."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/tilewise", "generate", "model", "two words"])
    assert own_command() == {"command": "tilewise generate model 'two words'"}
    monkeypatch.setattr(sys, "argv", [])
    assert own_command() == {"command": "''"}


def test_long_values_are_shown_where_they_differ():
    """Of both sides, with a little of what is the same before it."""
    same = "x" * 300
    said = refusal(f"{same}left{same}", f"{same}right{same}")
    before, after = f"...{'x' * 40}", "x" * (200 - 40 - len("left"))
    assert (
        f"got '{before}left{after}...' in the leader and '{before}right{after[1:]}...' in process 1" in said
    )
    assert "got 'a' in the leader and 'b' in process 1; start all processes" in refusal("a", "b")


@pytest.mark.parametrize("other", [None, 7, ["a"]])
def test_what_is_no_text_differs(other):
    """It is shown as it is."""
    assert f"and {other!r} in process 1" in refusal("a" * 500, other)
