"""`init` and `shutdown`: the begin and the end of a program over several processes.

No other call needs them. `init` joins the processes that a launcher started; `shutdown` closes
everything that is open in this process.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from types import TracebackType

from tilewise.comm import active_group
from tilewise.comm.launcher import launched
from tilewise.core import get_logger
from tilewise.core.errors import ConfigError
from tilewise.core.open_objects import close_all
from tilewise.core.validation import Validator, shown
from tilewise.distributed.group import launched_group

__all__ = ["ProcessRole", "init", "shutdown"]

_validate = Validator("distributed", ConfigError)


@dataclass(frozen=True)
class ProcessRole:
    """What this process is, as `init` returns it. As a context manager it calls `shutdown` at the
    end of its block.

    Attributes:
        rank: the number of this process; 0 is the leader.
        num_processes: number of processes that run this program together.
        launcher: the name of the launcher that started them, such as `mpiexec`; None without one.
    """

    rank: int
    num_processes: int
    launcher: str | None

    @property
    def is_leader(self) -> bool:
        """Whether this process runs the program. Workers only serve it."""
        return self.rank == 0

    def __enter__(self) -> ProcessRole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutdown()

    def __str__(self) -> str:
        what = "leader" if self.is_leader else "worker"
        by = "" if self.launcher is None else f", started by {self.launcher}"
        return f"process {self.rank} of {self.num_processes} ({what}{by})"


_role: tuple[int, bool | None, ProcessRole] | None = None  # process, `mpi`, result


def init(mpi: bool | None = None) -> ProcessRole:
    """Join the processes that a launcher (mpiexec, srun) started together with this one, and say
    what this process is. Calling it again with the same argument changes nothing.

    With several processes, it returns in the first one, the leader, after all have been compared.
    In the others it does not return: they serve the leader as workers until the leader's end, as
    with `ProcessGroup`. So no line after it runs twice. No other call needs `init`.

    Args:
        mpi: None to join if a launcher started several processes; True for the same, and to log
            if there is only this one, as MPI itself allows; False to work alone in any case, for
            example on one of many independent jobs.

    Returns:
        The rank and the number of processes.

    Raises:
        ConfigError: `mpi` is invalid or differs from an earlier call; or as for `ProcessGroup` and
            its `start`.
        PeerLost, CommTimeout: a process has ended, or does not answer.

    Examples:
        >>> with init() as role:
        ...     print(role)
        process 0 of 1 (leader)
    """
    global _role
    if mpi is not None:
        mpi = _validate.truth("init", "mpi", mpi)
    if _role is not None and _role[0] == os.getpid():
        if mpi not in (None, _role[1]):
            _validate.invalid(
                "init",
                "mpi must be as in the first call",
                f"{shown(mpi)} after {shown(_role[1])}",
                "call shutdown first",
            )
        return _role[2]
    launch = launched()
    group = active_group()
    if group is None and mpi is not False:
        launched_group()
        group = active_group()
        if group is not None:
            atexit.register(group.close)  # the workers of a program that does not call shutdown end in order
    count = 1 if group is None else group.num_processes
    role = ProcessRole(0, count, None if launch is None or count == 1 else launch.launcher)
    if mpi and count == 1:
        get_logger("distributed").info(
            "mpi=True, but no launcher started other processes; this one runs alone"
        )
    get_logger("distributed").info("%s", role)
    _role = os.getpid(), mpi, role
    return role


def shutdown() -> None:
    """Close every model, group of devices, task runtime and engine of this process, and its process
    group, so that the workers end; the newest first. Calling it again, or without `init`, is safe.

    A program started by a launcher can join its processes only once, so it calls this at its end.

    Raises:
        Exception: the first one that a `close` raised, such as PlanError for a model that another
            thread uses. Everything else is closed. Call it again to try again.
    """
    global _role
    close_all()
    _role = None
