"""`Peer`: the leader's view of one worker: its process, requests to it, and its answers.

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

__all__ = ["JoinedPeer", "Peer", "SpawnedPeer", "error_of", "row_of_error", "watched", "watched_too"]


class Peer:
    """A worker's process.

    Args:
        number: of the process; the leader is 0.
        channel: to it.

    Attributes:
        ended: a descriptor that can be read when it has ended; -1 where there is none, on another host.
        pid: of the process, once it is known.
        name: in words.
    """

    def __init__(self, number: int, channel: Channel | MpiChannel) -> None:
        self.number, self.channel = number, channel
        self.ended, self.pid = -1, -1
        self._owed: int | None = None  # the number of the question that it has not answered

    @property
    def name(self) -> str:
        return f"process {self.number}" + (f" (pid {self.pid})" if self.pid >= 0 else "")

    def ask(self, message: Message, files: Sequence[int | str] = ()) -> None:
        """Send a question, which has a number."""
        self.channel.send(message, files)  # type: ignore[arg-type]
        self._owed = message["id"]

    def answer(self, patience_s: float) -> Any:
        """What it says to the last question; an error of Tilewise's is returned, not raised.

        Raises:
            PeerLost: it is gone.
            CommTimeout: it gives no sign of life.
        """
        while True:
            message, _ = self.channel.receive(patience_s)
            if message.get("id") == self._owed:  # not one of the signs of life before it
                break
        self._owed = None
        return message["answer"] if "answer" in message else error_of(message.get("error"))

    def skip_answers(self, patience_s: float) -> None:
        """Wait for the answer to a question whose asker was interrupted."""
        if self._owed is not None:
            self.answer(patience_s)

    def has_ended(self) -> bool:
        """Whether its process is gone, as far as this host can see."""
        if self.ended < 0:
            return False
        poll = select.poll()
        poll.register(self.ended, select.POLLIN)
        return bool(poll.poll(0))

    def ending(self) -> str:
        """How it has ended, in words."""
        raise NotImplementedError

    def close(self, patience_s: float) -> None:
        """Wait for its end, which a closed channel brings, and give everything back."""
        self.channel.close()
        if self.ended >= 0:
            os.close(self.ended)


class SpawnedPeer(Peer):
    """A process that the leader has started.

    Args:
        number: of the process.
        worker: the module whose `main` it runs.
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
    """A process that a launcher has started next to the leader.

    Args:
        number: of the process, and in the world.
        world: of both.
    """

    def __init__(self, number: int, world: World) -> None:
        self._wire_channel = MpiChannel(world, number, f"process {number}")
        super().__init__(number, self._wire_channel)

    def met(self, pid: object, is_local: bool) -> None:
        """What it has said of itself.

        Raises:
            PeerLost: it is gone, or has no such number.
        """
        if type(pid) is not int or not 0 < pid < 1 << 31:
            raise PeerLost(
                f"[comm.ProcessGroup] a process must say its number; got {pid!r} from {self.name}; start all again"
            )
        self.pid = pid
        self._wire_channel.peer = self.name
        if is_local:
            self.ended = watched(pid)
        self._wire_channel.watch(self.ended)

    def ending(self) -> str:
        return "see what it printed, or its launcher"

    def let_go(self) -> None:
        """It may end."""
        with suppress(CommError):
            self.channel.send({"what": "end"})


def watched(pid: int) -> int:
    """A descriptor that can be read when a process of this host has ended; the caller closes it.

    Raises:
        PeerLost: there is no such process any more.
        ResourceError: the system gives none.
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


def watched_too(ended: int) -> int:
    """Another descriptor for what `watched` has returned, to be closed by itself; -1 for none.

    Raises:
        ResourceError: the system gives none.
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
    """An error as a worker tells it: the name of its class, and its text."""
    if isinstance(error, TilewiseError):
        return [type(error).__name__, str(error)]
    return ["InternalError", f"[comm.ProcessGroup] a worker must not fail; got {error!r}; report it"]


def error_of(row: Any) -> TilewiseError:
    """The error again."""
    name, text = row if isinstance(row, list) and len(row) == 2 else ("", str(row))
    kind = getattr(errors, str(name), InternalError)
    is_known = isinstance(kind, type) and issubclass(kind, TilewiseError)
    return (kind if is_known else InternalError)(str(text))
