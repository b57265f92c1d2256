"""Signals between devices, as a tile program names them.

A signal is a 64-bit counter in symmetric memory: the same index on every device, counting up, never reset. The signals
themselves live in native/comm; the planner decides who raises what.
"""

from tilewise.ir.program import Notify, Wait

__all__ = ["Notify", "Wait"]
