"""The facts that processes compare when they connect, and the message about a difference."""

import sys

import pytest

from tilewise.comm.facts import own_command, require_equal
from tilewise.core import ConfigError


def refusal(own, other):
    with pytest.raises(ConfigError) as refused:
        require_equal({"command": own}, {"command": other}, "process 1")
    return str(refused.value)


def test_commands_are_compared_without_the_programs_folder(monkeypatch):
    """Hosts may spell the program's folder differently."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/tilewise", "generate", "model", "two words"])
    assert own_command() == {"command": "tilewise generate model 'two words'"}
    monkeypatch.setattr(sys, "argv", [])
    assert own_command() == {"command": "''"}


def test_long_values_are_shown_where_they_differ():
    """Both sides, with a little of the common text before the difference."""
    same = "x" * 300
    message = refusal(f"{same}left{same}", f"{same}right{same}")
    before, after = f"...{'x' * 40}", "x" * (200 - 40 - len("left"))
    assert (
        f"got '{before}left{after}...' in the leader and '{before}right{after[1:]}...' in process 1"
        in message
    )
    assert "got 'a' in the leader and 'b' in process 1; start all processes" in refusal("a", "b")


@pytest.mark.parametrize("other", [None, 7, ["a"]])
def test_facts_that_are_not_text_are_compared(other):
    """They are shown as they are."""
    assert f"and {other!r} in process 1" in refusal("a" * 500, other)
