"""`World`: the processes that a launcher (mpiexec, srun) started together, connected by MPI.

A process joins and leaves its world at most once, because MPI cannot be started twice. Process 0 is
the leader. All other processes are workers (`distributed.worker`).
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilewise._native.connection import World as Native
from tilewise._native.connection import join_world as join_native
from tilewise.comm.launcher import Launched, ending_by_mpi, launched, require_mpi, require_world
from tilewise.core.environment import on_host
from tilewise.core.errors import LOST, ConfigError

__all__ = ["World", "join_world"]

# MPICH's mpiexec sends it after a process has failed, and it would end the others
_OTHER_LOST = signal.SIGUSR1
_JOIN_S = 60.0  # from the first process that joins to the last
_SEGMENT = re.compile(r"/dev/shm/mpich_shm_\w+")  # memory that MPICH's processes of one host share
_world: World | None = None


class World:
    """The processes that `join_world` has connected.

    Attributes:
        native: the native object that sends and receives messages.
    """

    def __init__(self, native: Native) -> None:
        self.native = native
        self._owner = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this process joined the world. False in a fork, which must not use it, because it
        would receive messages for its parent.
        """
        return os.getpid() == self._owner

    @property
    def rank(self) -> int:
        """The number of this process; 0 is the leader."""
        return self.native.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.native.size

    def leave(self) -> None:
        """End MPI, together with all other processes. If a process is lost, do nothing: MPI is then
        not used any more.
        """
        if not self.native.cause:
            self.native.leave()

    def give_up(self, cause: str) -> None:
        """Note that a process is lost; MPI is not used any more."""
        self.native.fail(cause)


def join_world() -> World | None:
    """Connect to the processes that were started together with this one. Returns None if this
    process was started alone.

    If other processes do not join in time, for example after an earlier failure, this process
    reports this and exits with the code for a lost process.

    Raises:
        ConfigError: there is no MPI, it does not start, it disagrees with the launcher about the
            processes, this process is a fork, or it has already left its world.
    """
    global _world
    if _world is not None:
        if not _world.is_own:
            raise ConfigError(
                "[comm.world] only a process that the launcher started may join its world; got a forked copy; open "
                "the group in the original process"
            )
        if _world.native.cause:
            raise ConfigError(
                "[comm.world] processes of a launcher can join only once; got a second time, after the end "
                f"({_world.native.cause}); keep one group open for the whole program"
            )
        return _world
    launch = launched()
    if launch is None or not launch.has_several:
        return None
    library = require_mpi(launch)
    if signal.getsignal(_OTHER_LOST) == signal.SIG_DFL:
        with suppress(ValueError):  # only the main thread may set handlers
            signal.signal(_OTHER_LOST, signal.SIG_IGN)
    ending = f"tilewise: {ending_by_mpi(launch, library.name)}\n"
    with _in_time(launch):
        native = join_native(str(library.table), str(library.library or ""), ending)
    _unlink_segments()  # before `require_world` may fail, after which MPI is not finalized
    try:
        require_world(launch, native.rank, native.size, library.name)
    except ConfigError as error:
        native.fail(str(error))
        raise
    _world = World(native)
    # Threads of MPI must not outlive the interpreter.
    atexit.register(_world.give_up, "the program has ended")
    return _world


@contextmanager
def _in_time(launch: Launched) -> Iterator[None]:
    """Limits the time of a block in which MPI waits for all processes; MPI itself would wait for ever."""

    def give_up() -> None:
        print(
            f"tilewise: [comm.world] processes of a launcher must join within {_JOIN_S:g} s; got {launch}{on_host()} "
            f"by {launch.launcher}, and not all others; see what they printed, and start all again",
            file=sys.stderr,
            flush=True,
        )
        _unlink_segments()
        os._exit(LOST)

    timer = threading.Timer(_JOIN_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _unlink_segments() -> None:
    """Remove the names of MPI's shared memory, which would remain after a process is killed. Call
    it only when all processes that share the memory have joined.
    """
    for path in set(_SEGMENT.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))):
        with suppress(OSError):
            os.unlink(path)
