"""What an instruction waits for and whom it notifies.

Plain tuples, handed to `Program.add_instr` as they are.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Notify", "Wait"]


class Wait(NamedTuple):
    """A task is not ready before a signal of its own device has counted `increment` further.

    Iteration i looks at signal `signal_base + i` if `per_index`, else at `signal_base`. The device keeps
    count of what it expects of each signal, so repeated waits speak of successive epochs; an increment of 0
    waits for the epoch that an earlier wait asked for. No worker is held meanwhile.
    """

    signal_base: int
    per_index: bool
    increment: int


class Notify(NamedTuple):
    """Add one to a signal of `device` once the task is complete (or skipped: then with the error's id).

    Whoever sees the new value also sees everything that this task and its predecessors wrote.
    """

    device: int
    signal_base: int
    per_index: bool
