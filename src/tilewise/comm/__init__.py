"""Signals between devices, and groups of processes that run the devices of one plan.

A signal is a 64-bit counter in symmetric memory: it has the same index on every device, counts up,
and is never reset. A device posts a signal (adds to it), and another device waits for it. Native
code (native/comm) stores signals, and the planner decides which device posts which signal.

A group of processes (`comm.group`) consists of the leader, which runs the user's program, and its
workers. The processes share the memory of their devices (`comm.memory`) and exchange messages
through unnamed sockets (`comm.channel`) or MPI (`comm.mpi_channel`).
"""

from tilewise.comm.group import Group, active_group
from tilewise.ir.program import Notify, Wait

__all__ = ["Group", "Notify", "Wait", "active_group"]
