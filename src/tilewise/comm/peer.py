"""`Peer`: the leader's view of one worker: the worker's process, requests to it, and its answers.

The leader started the worker itself (`SpawnedPeer`), or a launcher started both (`JoinedPeer`).
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tilewise._native.connection import World
from tilewise.comm.channel import Channel, Message
from tilewise.comm.mpi_channel import MpiChannel
from tilewise.core import errors
from tilewise.core.errors import CommError, InternalError, PeerLost, ResourceError, TilewiseError
from tilewise.processes.children import Spawned

__all__ = ["JoinedPeer", "Peer", "SpawnedPeer", "duplicate_watched", "error_of", "row_of_error", "watched"]


class Peer:
    """A worker's process.

    Args:
        number: the process's number; the leader is 0.
        channel: the channel to the process.

    Attributes:
        ended: a descriptor that becomes readable when the process has ended; -1 for a process on another host.
        pid: the process id; -1 until it is known.
        name: description of the worker in messages.
    """

    def __init__(self, number: int, channel: Channel | MpiChannel) -> None:
        self.number, self.channel = number, channel
        self.ended, self.pid = -1, -1
        self._owed: int | None = None  # the id of the request that it has not answered

    @property
    def name(self) -> str:
        return f"process {self.number}" + (f" (pid {self.pid})" if self.pid >= 0 else "")

    def ask(self, message: Message, files: Sequence[int | str] = ()) -> None:
        """Send a request, which has an id."""
        self.channel.send(message, files)  # type: ignore[arg-type]
        self._owed = message["id"]

    def answer(self, patience_s: float) -> Any:
        """The answer to the last request. An error that the worker reports is returned, not raised.

        Raises:
            PeerLost: the process has ended.
            CommTimeout: neither an answer nor a heartbeat arrived in time.
        """
        while True:
            message, _ = self.channel.receive(patience_s)
            if message.get("id") == self._owed:  # heartbeats have no id
                break
        self._owed = None
        return message["answer"] if "answer" in message else error_of(message.get("error"))

    def skip_answers(self, patience_s: float) -> None:
        """Wait for the answer to a request whose caller was interrupted."""
        if self._owed is not None:
            self.answer(patience_s)

    def has_ended(self) -> bool:
        """Whether the worker's process has ended; False for a process on another host."""
        if self.ended < 0:
            return False
        poll = select.poll()
        poll.register(self.ended, select.POLLIN)
        return bool(poll.poll(0))

    def ending(self) -> str:
        """How the worker's process ended, in words."""
        raise NotImplementedError

    def close(self, patience_s: float) -> None:
        """Close the channel, which makes the process end. Wait for the process, and close its
        descriptor.
        """
        self.channel.close()
        if self.ended >= 0:
            os.close(self.ended)


class SpawnedPeer(Peer):
    """A process that the leader started.

    Args:
        number: the process's number.
        worker: the module whose `main` the process runs.
    """

    def __init__(self, number: int, worker: str) -> None:
        self._spawned = Spawned(worker, apart=True, shares_stdout=False)
        channel = Channel(self._spawned.link, "")
        super().__init__(number, channel)
        self.pid = self._spawned.process.pid
        channel.peer = self.name
        try:
            self.ended = watched(self.pid)
        except ResourceError:
            self._spawned.end(0.0)
            raise
        channel.watch(self.ended)

    def ending(self) -> str:
        return self._spawned.ending()

    def close(self, patience_s: float) -> None:
        self.channel.close()
        self._spawned.end(patience_s)
        os.close(self.ended)


class JoinedPeer(Peer):
    """A process that a launcher started together with the leader.

    Args:
        number: the process's number, which is also its rank in `world`.
        world: the launcher's processes.
    """

    def __init__(self, number: int, world: World) -> None:
        self._mpi_channel = MpiChannel(world, number, f"process {number}")
        super().__init__(number, self._mpi_channel)

    def met(self, pid: object, is_local: bool) -> None:
        """Store the process id that the process reported. If the process is on this host, watch for
        its end.

        Raises:
            PeerLost: the process has ended, or the process id is invalid.
        """
        if type(pid) is not int or not 0 < pid < 1 << 31:
            raise PeerLost(
                f"[comm.ProcessGroup] a process must report its process id; got {pid!r} from {self.name}; "
                "start all again"
            )
        self.pid = pid
        self._mpi_channel.peer = self.name
        if is_local:
            self.ended = watched(pid)
        self._mpi_channel.watch(self.ended)

    def ending(self) -> str:
        return "see what it printed, or its launcher"

    def let_go(self) -> None:
        """Allow the process to end."""
        with suppress(CommError):
            self.channel.send({"what": "end"})


def watched(pid: int) -> int:
    """A descriptor that becomes readable when a process of this host has ended; the caller closes it.

    Raises:
        PeerLost: the process does not exist any more.
        ResourceError: the limit of open files is reached.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerLost(
            f"[comm.ProcessGroup] processes must live as long as their group; got the end of pid {pid} at its start; "
            "see what it printed, and whether memory is short"
        ) from None
    except OSError as error:
        raise _no_descriptor(error) from None


def duplicate_watched(ended: int) -> int:
    """A duplicate of a descriptor of `watched`, which the caller closes; -1 for -1.

    Raises:
        ResourceError: the limit of open files is reached.
    """
    try:
        return os.dup(ended) if ended >= 0 else -1
    except OSError as error:
        raise _no_descriptor(error) from None


def _no_descriptor(error: OSError) -> ResourceError:
    return ResourceError(
        f"[comm.ProcessGroup] a process must be watched; got {error.strerror!r}; raise the limit of open files "
        "(ulimit -n)"
    )


def row_of_error(error: BaseException) -> list[str]:
    """An error in a worker's answer: the name of its class, and its text."""
    if isinstance(error, TilewiseError):
        return [type(error).__name__, str(error)]
    return ["InternalError", f"[comm.ProcessGroup] a worker must not fail; got {error!r}; report it"]


def error_of(row: Any) -> TilewiseError:
    """The error that `row_of_error` wrote."""
    name, text = row if isinstance(row, list) and len(row) == 2 else ("", str(row))
    kind = getattr(errors, str(name), InternalError)
    is_known = isinstance(kind, type) and issubclass(kind, TilewiseError)
    return (kind if is_known else InternalError)(str(text))
