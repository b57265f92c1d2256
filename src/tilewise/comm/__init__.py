"""Signals between devices, as a tile program names them, and processes of one host that have devices of one plan.

A signal is a 64-bit counter in symmetric memory: the same index on every device, counting up, never
reset. The signals themselves live in native/comm; the planner decides which device posts which
signal. Processes (`comm.group`) share the devices' memory (`comm.memory`); what they say to each
other next to it goes through sockets that have no name (`comm.channel`).
"""

from tilewise.comm.group import Group, active_group
from tilewise.ir.program import Notify, Wait

__all__ = ["Group", "Notify", "Wait", "active_group"]
