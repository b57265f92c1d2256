"""Functions and objects that tests give to workers."""

import os

from tilewise.core.kept import HERE, keep


@keep
class Thing:
    """Never changes."""

    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return Thing, (self.data,)


def look(thing):
    """What it holds, in short."""
    return len(thing.data), thing.data[:1]


def look_from(thing):
    """The same, and where."""
    return look(thing), os.getpid()


def make(number):
    """One of many bytes."""
    return Thing(bytes([number]) * 10_000)


def is_here():
    """How many this process keeps."""
    return len(HERE.things)


def invalid(thing):
    """An error."""
    raise ValueError(f"no such {thing.data[:1]!r}")
