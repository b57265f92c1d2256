"""Signals between devices, and groups of processes that run the devices of one plan.

A signal is a 64-bit counter in symmetric memory: it has the same index on every device, counts up,
and is never reset. Signals are stored by native/comm; the planner decides which device posts which
signal. Processes (`comm.group`) share the memory of their devices (`comm.memory`) and exchange
messages through unnamed sockets (`comm.channel`).
"""

from tilewise.comm.group import Group, active_group
from tilewise.ir.program import Notify, Wait

__all__ = ["Group", "Notify", "Wait", "active_group"]
