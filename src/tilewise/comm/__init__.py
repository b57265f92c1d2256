"""Signals between devices, as a tile program names them.

A signal is a 64-bit counter in symmetric memory: the same index on every device, counting up, never reset.
Owns only the two shapes below; the signals themselves live in native/comm, and the planner decides who raises
what.
"""

from __future__ import annotations

from tilewise.comm.signals import Notify, Wait

__all__ = ["Notify", "Wait"]
