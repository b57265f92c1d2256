"""`Group`: this process (the leader) and worker processes. The devices of a plan are distributed
over them.

The leader runs all of the user's Python code and has devices of its own. A worker receives a plan's
program and runs lists of tasks on the leader's request. On the leader's host a worker allocates
nothing; the leader allocates the memory and sends its descriptors. Rare messages use a channel per
worker; runs do not. Either the leader starts the workers on its own host, or a launcher starts all
processes, on one or several hosts (`comm.world`).

If a process of the group ends, the group ends: the other processes are stopped, and every later
call raises an error that names the process and how it ended.

State: the open group of this process (`active_group`), at most one. Any thread may call; calls are
executed one at a time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tilewise._native.connection import World as Native
from tilewise.comm.facts import own_command, own_facts, own_host, require_equal
from tilewise.comm.links import BUSY_S, ClockOffset, Link, bandwidth, clock_offset, round_trip
from tilewise.comm.peer import JoinedPeer, Peer, SpawnedPeer, duplicate_watched, error_of, watched
from tilewise.comm.world import World
from tilewise.core.errors import CommError, ConfigError, PeerLost, PlanError, TilewiseError
from tilewise.core.mesh import MAX_DEVICES
from tilewise.core.open_objects import note_open
from tilewise.core.validation import Validator

if TYPE_CHECKING:
    from tilewise.comm.group_executor import GroupExecutor, SpreadExecutor

__all__ = ["Group", "active_group"]

_START_S = 120.0
_ANSWER_S = 30.0  # seconds without a heartbeat
_END_S = 5.0
_SEEN_S = 0.5  # from the end of a process's socket to the end of the process
_CLOSED = "[comm.ProcessGroup] a group must be open; got a closed one; open another"
_validate = Validator("comm", ConfigError)
_active: Group | None = None


def active_group() -> Group | None:
    """The group that this process has open."""
    return _active if _active is not None and _active.is_own else None


class Group:
    """Processes that run plans together. Close the group, or use it with `with`. A process has at
    most one open group.

    While it is open, plans over several devices are distributed over its processes: device d of D
    over N processes is on process `d * N // D`. The processes start with the first such plan, or
    with `start`.

    Args:
        num_processes: number of processes, including this one.
        worker: the module whose `main` runs in a worker that this process starts.
        world: the processes, if a launcher started them; otherwise None. This process is the
            leader.

    Attributes:
        num_processes: number of processes, including this one.
        hosts: per process, the number of its host; the leader's host is 0. Available after the
            start.

    Raises:
        ConfigError: the number is not between 1 and 1024, or another group is open.
    """

    def __init__(self, num_processes: int, worker: str, world: World | None = None) -> None:
        global _active
        self.num_processes = _validate.integer("ProcessGroup", "num_processes", num_processes, 1, MAX_DEVICES)
        if active_group() is not None:
            _validate.invalid(
                "ProcessGroup",
                "a process may have only one group at a time",
                "a second one",
                "close the first",
            )
        self._worker, self._world, self._owner = worker, world, os.getpid()
        self._peers: list[Peer] = []
        self.hosts = [0]
        self._ends: list[int] = []
        self._cause: str | None = None  # why the group has ended
        self._num_asked = self._num_opened = 0
        self._spread_executors: set[SpreadExecutor] = set()
        # those whose `GroupExecutor` was dropped without `close`
        self._dropped: deque[SpreadExecutor] = deque()
        self._lock = threading.RLock()
        _active = self
        note_open(self)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_own(self) -> bool:
        """Whether this process opened the group; False in a fork."""
        return os.getpid() == self._owner

    @property
    def is_over(self) -> bool:
        """Whether the group is closed, or a process of it is lost."""
        return self._cause is not None

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that have started, this process first."""
        return [self._owner, *(peer.pid for peer in self._peers)]

    def start(self) -> None:
        """Start the other processes now, and wait until they are ready.

        Raises:
            ConfigError: a process would not compute the same, because its version, native module,
                instruction set or command differs.
            PeerLost: a process has ended.
            CommTimeout: a process does not answer.
        """
        with self._lock:
            self.require_open()
            if self._peers:
                return
            with self._over_after(BaseException):
                for number in range(1, self.num_processes):
                    self._peers.append(self._peer(number))
                try:
                    names = self._meet()
                except CommError:
                    raise
                except TilewiseError:
                    self._let_go()
                    raise
                seen = list(dict.fromkeys(names))
                self.hosts = [seen.index(name) for name in names]
                self._ends = [watched(self._owner)]
                for peer in self._peers:
                    self._ends.append(duplicate_watched(peer.ended))
                for peer in self._peers:
                    begin = {"process": peer.number, "pids": self.pids, "hosts": self.hosts}
                    peer.channel.send(begin, () if self._world else self._ends)

    def _meet(self) -> list[str]:
        """Compare the facts of all processes, and return the host of each."""
        own, names = own_facts(), [own_host()]
        if self._world is not None:
            own |= own_command()
        for peer in self._peers:
            hello, _ = peer.channel.receive(_START_S)
            if "error" in hello:
                error = error_of(hello["error"])
                raise type(error)(f"{error} ({peer.name})")
            require_equal(own, hello, peer.name)
            names.append(str(hello.get("host")))
            if isinstance(peer, JoinedPeer):
                peer.met(hello.get("pid"), names[-1] == names[0])
        return names

    def _let_go(self) -> None:
        """Let the processes of a launcher end, together with this one, by MPI."""
        if self._world is not None:
            for peer in self._peers:
                if isinstance(peer, JoinedPeer):
                    peer.let_go()
            if any(peer.has_ended() for peer in self._peers):  # no process may end before this one
                self._world.give_up("a process has ended before the others")
            self._world.leave()

    def _peer(self, number: int) -> Peer:
        if self._world is None:
            return SpawnedPeer(number, self._worker)
        return JoinedPeer(number, self._world.native)

    def close(self) -> None:
        """End the workers. Executors over several processes are closed first. Arrays over their
        memory stay valid.
        """
        global _active
        if not self.is_own:
            return
        with self._lock:
            for spread_executor in self._spread_executors:
                spread_executor.close()
            self._spread_executors.clear()
            if self._world is not None and self._cause is None:
                self.start()  # processes without work still wait for the start
                self._let_go()
            self._end(_CLOSED, _END_S)
        if _active is self:
            _active = None

    # ---- executors ----------------------------------------------------------------------------------------

    def processes_of(self, num_devices: int) -> list[int]:
        """The process of each device: blocks of adjacent devices of nearly equal size.

        Raises:
            ConfigError: `num_devices` is not a valid number of devices.
            PlanError: a process would have no device.
        """
        num_devices = _validate.integer("ProcessGroup", "num_devices", num_devices, 0, MAX_DEVICES)
        if num_devices < self.num_processes:
            raise PlanError(
                f"[comm.ProcessGroup] every process needs a device; got {num_devices} devices for "
                f"{self.num_processes} processes; choose a larger mesh, or start fewer processes"
            )
        return [device * self.num_processes // num_devices for device in range(num_devices)]

    def open_executor(
        self, content: bytes, options: Mapping[str, Any], file_directory: str = ""
    ) -> GroupExecutor:
        """Allocate memory and start workers for a plan's devices, in all processes.

        Args:
            content: the plan's program, as the workers read it.
            options: options of the native executor, as in one process.
            file_directory: directory of the devices' files, on every host.

        Raises:
            PlanError: there are fewer devices than processes.
            ResourceError: not enough memory or descriptors.
            PeerLost, CommTimeout: a process has ended, or does not answer.
        """
        from tilewise.comm.group_executor import GroupExecutor, SpreadExecutor

        processes = self.processes_of(options["num_devices"])
        with self._lock:
            self.start()
            while self._dropped:
                self._dropped.popleft().close()
            self._spread_executors = {each for each in self._spread_executors if not each.is_closed}
            self._num_opened += 1
            connection = self._world.native.connection if self._world is not None else None
            spread = (content, options, file_directory)
            spread_executor = SpreadExecutor(
                self, self._num_opened, processes, self._ends, *spread, connection
            )
            self._spread_executors.add(spread_executor)
        executor = GroupExecutor(spread_executor)
        # it may be dropped during a request
        weakref.finalize(executor, self._dropped.append, spread_executor)
        return executor

    def ask(
        self,
        executor: int,
        what: str,
        *arguments: object,
        files: Callable[[int], Sequence[int | str]] = lambda process: (),
        then: Callable[[], object] = lambda: None,
        only: Sequence[int] | None = None,
    ) -> list[Any]:
        """Send a request about an executor to every worker, and collect the answers.

        Args:
            executor: the executor's number.
            what: name of the request.
            arguments: plain values.
            files: what each process receives: descriptors, paths, or -1 for none.
            then: called after all requests were sent, before waiting for answers.
            only: the processes to ask; by default all.

        Returns:
            The answer of each process that was asked.

        Raises:
            TilewiseError: the first error that a worker reported.
            PeerLost, CommTimeout: a worker has ended, or does not answer. The group has then ended.
        """
        with self._lock, self._over_after(CommError):
            self.require_open()
            for peer in self._peers:
                peer.skip_answers(_ANSWER_S)
            self._num_asked += 1
            message = {
                "id": self._num_asked,
                "executor": executor,
                "what": what,
                "arguments": list(arguments),
            }
            # otherwise some workers would wait for those that did not get the request
            with self._over_after(BaseException):
                asked = [peer for peer in self._peers if only is None or peer.number in only]
                for peer in asked:
                    peer.ask(message, files(peer.number))
                then()
            answers = [peer.answer(_ANSWER_S) for peer in asked]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def measure_links(self) -> list[Link]:
        """Measure the speed of the connection to every worker that a launcher started. Returns an
        empty list without a launcher.

        Raises:
            PeerLost, CommTimeout: a process has ended, or does not answer. The group has then
                ended.
        """
        links: list[Link] = []
        if self._world is None:
            return links
        native = self._world.native
        with self._lock:
            self.start()
            for number, host in enumerate(self.hosts[1:], 1):
                rates: list[float] = []
                measure = partial(_add_bandwidth, native, number, rates)
                trip = round_trip(native, number)
                measure()
                self.ask(0, "compute", BUSY_S, only=[number], then=measure)
                links.append(Link(number, host, trip, *rates))
        return links

    def clock_offset(self, process: int) -> ClockOffset:
        """By how much a worker's clock is ahead of the leader's, and the error, measured now,
        because clocks drift.

        Raises:
            PeerLost, CommTimeout: the worker has ended, or does not answer. The group has then
                ended.
        """
        return clock_offset(lambda: int(self.ask(0, "clock", only=[process])[0]))

    def lost(self, error: CommError) -> CommError:
        """End the group because of an error. Returns an error that also says how the processes
        ended.
        """
        with self._lock:
            until = time.monotonic() + _SEEN_S
            while (
                not (gone := [peer for peer in self._peers if peer.has_ended()]) and time.monotonic() < until
            ):
                time.sleep(0.005)  # the socket closes before the process ends
            how = "".join(f"; {peer.name} has ended: {peer.ending()}" for peer in gone)
            full_error = type(error)(f"{error}{how}")
            self._end(str(full_error), 0.0)
            return full_error

    @contextmanager
    def _over_after(self, kind: type[BaseException]) -> Iterator[None]:
        """A block after whose failure the group ends, because the workers' state is unknown."""
        try:
            yield
        except kind as error:
            if self._cause is None and isinstance(error, CommError):
                raise self.lost(error) from None
            self._end(
                f"[comm.ProcessGroup] a group must be whole; got its end by {error!r}; open another", 0.0
            )
            raise

    def require_open(self) -> None:
        """Reject calls after the end of the group.

        Raises:
            PeerLost: the group is closed, or a process is lost. The message says why.
        """
        if self._cause is not None:
            raise PeerLost(self._cause)

    def _end(self, cause: str, patience_s: float) -> None:
        """End all workers, for a reason that later errors name."""
        if self._cause is not None:
            return
        self._cause = cause
        if self._world is not None and cause != _CLOSED:
            self._world.give_up(cause)
        until = time.monotonic() + patience_s
        for peer in self._peers:
            peer.channel.close()
        for peer in self._peers:
            peer.close(max(0.0, until - time.monotonic()))
        for end in self._ends:
            if end >= 0:
                os.close(end)
        self._ends = []


def _add_bandwidth(world: Native, process: int, rates: list[float]) -> None:
    rates.append(bandwidth(world, process))
