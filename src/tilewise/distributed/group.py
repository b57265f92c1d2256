"""`ProcessGroup`: this process and others, which run devices together."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from tilewise.comm import Group
from tilewise.comm.launcher import launched
from tilewise.comm.world import join_world
from tilewise.core.errors import ConfigError

__all__ = ["ProcessGroup", "launched_group"]

_WORKER = "tilewise.distributed.worker"


class ProcessGroup(Group):
    """This process and its workers. While the group is open, models over several devices use all of
    these processes. Nothing else changes in a program, and no bit of a result changes.

    Without a launcher, this process starts `num_processes - 1` workers on this host. If a launcher
    (mpiexec, srun) started several processes, on one host or several, the first process continues.
    In all others the constructor does not return: they serve the first process as workers until
    they end. A single process is a group of one.

    Args:
        num_processes: number of processes, including this one; not needed with a launcher.

    Raises:
        ConfigError: the number is not between 1 and 1024, or differs from the launcher's number. Or
            another group is open, or MPI is missing or disagrees with the launcher.

    Examples:
        >>> with ProcessGroup(2) as group:
        ...     group.start()  # or with the first model that needs them
        ...     len(group.pids)
        2
    """

    def __init__(self, num_processes: int | None = None) -> None:
        world = join_world()
        if num_processes is None and world is None and launched() is not None:
            num_processes = 1  # a launcher that was asked for one process
        if num_processes is None and world is None:
            raise ConfigError(
                "[comm.ProcessGroup] num_processes must be given if no launcher started this process; got None; "
                "pass a number, or start with mpiexec"
            )
        if num_processes is not None and world is not None and num_processes != world.size:
            raise ConfigError(
                f"[comm.ProcessGroup] num_processes must be omitted, or the number that the launcher started; got "
                f"{num_processes!r} and {world.size} processes; leave it out"
            )
        if world is not None and world.rank > 0:
            import_module(_WORKER).serve_world(world)
        size = world.size if world is not None else num_processes
        super().__init__(size, _WORKER, world)  # type: ignore[arg-type]


def launched_group() -> AbstractContextManager[object]:
    """A group of the processes that a launcher started together with this one.

    For a single process it does nothing. In the first process it returns after all processes have
    been compared, so processes that cannot take part in one run are rejected before any work. In
    all other processes it serves the first one and does not return.

    Raises:
        ConfigError: as for `ProcessGroup` and its `start`.
        PeerLost: a process has ended.
        CommTimeout: a process does not answer.
    """
    if join_world() is None:
        return nullcontext()
    group = ProcessGroup()
    group.start()
    return group
