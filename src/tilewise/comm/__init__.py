"""Signals between devices, and groups of processes that run the devices of one plan.

A signal is a 64-bit counter in symmetric memory: it has the same index on every device, counts up,
and is never reset. A device posts a signal (adds to it), and another device waits for it. Native
code (native/comm) stores signals, and the planner decides which device posts which signal.

A group of processes (`comm.group`) consists of the leader, which runs the user's program, and its
workers. The processes share the memory of their devices (`comm.memory`) and exchange messages
through unnamed sockets (`comm.channel`) or MPI (`comm.mpi_channel`).

The primitives of tile programs (`comm.primitives`) let users write how devices exchange tiles and
signals. `local` runs them on threads.

Names that need the native module are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewise.comm.local import local
from tilewise.comm.primitives import (
    barrier,
    compare_swap,
    consume_token,
    fence,
    fetch_add,
    get,
    kernel,
    matmul,
    notify,
    num_ranks,
    put,
    put_signal,
    quiet,
    rank,
    symm_at,
    tiles,
    wait,
    wait_all,
    wait_any,
    wait_some,
)
from tilewise.ir.program import Notify, Wait

if TYPE_CHECKING:
    from tilewise.comm.group import Group, active_group

__all__ = [
    "Group",
    "Notify",
    "Wait",
    "active_group",
    "barrier",
    "compare_swap",
    "consume_token",
    "fence",
    "fetch_add",
    "get",
    "kernel",
    "local",
    "matmul",
    "notify",
    "num_ranks",
    "put",
    "put_signal",
    "quiet",
    "rank",
    "symm_at",
    "tiles",
    "wait",
    "wait_all",
    "wait_any",
    "wait_some",
]


def __getattr__(name: str) -> Any:
    if name in ("Group", "active_group"):
        return getattr(import_module("tilewise.comm.group"), name)
    raise AttributeError(f"module 'tilewise.comm' has no attribute {name!r}")
