"""`Peer`: one worker of a group, as the leader has it: its process, what it is asked, what it answers."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from typing import Any

from tilewise.comm.channel import Channel, Message
from tilewise.core import errors
from tilewise.core.errors import InternalError, ResourceError, TilewiseError
from tilewise.core.spawn import Spawned

__all__ = ["Peer", "error_of", "row_of_error"]


class Peer:
    """A worker's process.

    Args:
        number: of the process; the leader is 0.
        worker: the module whose `main` it runs.

    Attributes:
        ended: a descriptor that can be read when it has ended.
    """

    def __init__(self, number: int, worker: str) -> None:
        self.spawned = Spawned(worker, apart=True)
        self.pid = self.spawned.process.pid
        self.name = f"process {number} (pid {self.pid})"
        try:
            self.ended = os.pidfd_open(self.pid)
        except OSError as error:
            self.spawned.end(0.0)
            raise ResourceError(
                f"[comm.ProcessGroup] a worker must be watched; got {error.strerror!r}; raise the limit of open files "
                "(ulimit -n)"
            ) from None
        self.channel = Channel(self.spawned.link, self.name, self.ended)
        self._owed: int | None = None  # the number of the question that it has not answered

    def ask(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a question, which has a number."""
        self.channel.send(message, files)
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
        """Whether its process is gone."""
        poll = select.poll()
        poll.register(self.ended, select.POLLIN)
        return bool(poll.poll(0))

    def close(self, patience_s: float) -> None:
        """Wait for its end, which a closed socket brings, and give everything back."""
        self.channel.close()
        self.spawned.end(patience_s)
        os.close(self.ended)


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
