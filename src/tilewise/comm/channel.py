"""`Channel`: messages between a group's leader and one of its workers, through one end of a pair of sockets.

A message is a frame of JSON (`core.process`), an object, and may bring descriptors: its entry `files` says how many.
Nothing is pickled, and what a message says is checked where it is used. Descriptors travel next to the first bytes of
their frame, so that they are here when the frame is whole. What was read of a message stays when a call is interrupted
or late: the next call goes on there.
"""

from __future__ import annotations

import array
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tilewise.core.errors import CommError, CommTimeout, PeerLost, ResourceError
from tilewise.core.process import HEAD, MOST_BYTES, pack, unpack

__all__ = ["Channel", "Message"]

Message = dict[str, Any]
_FILES_AT_ONCE = 250  # Linux takes 253
_PIECE = 1 << 16
_SPACE = socket.CMSG_SPACE(_FILES_AT_ONCE * array.array("i").itemsize)


class Channel:
    """One end. One thread sends at a time, and one receives.

    Args:
        link: the socket; closed with this.
        peer: who is at the other end, in words.
        ended: a descriptor that can be read when the other process has ended, for the case that another process still
            holds its end; -1 for none. It stays the caller's.
    """

    def __init__(self, link: socket.socket, peer: str, ended: int = -1) -> None:
        self.peer = peer
        self._link, self._ended = link, ended
        self._left, self._files = bytearray(), deque[int]()

    @classmethod
    def of(cls, descriptor: int, peer: str) -> Channel:
        """An end whose socket another process has left open under this number."""
        return cls(socket.socket(fileno=descriptor), peer)

    def watch(self, ended: int) -> None:
        """Notice the end of the other process by a descriptor, too; it stays the caller's."""
        self._ended = ended

    def send(self, message: Message, files: Sequence[int] = (), patience_s: float = 60.0) -> None:
        """One message.

        Args:
            message: plain values.
            files: descriptors for the other process, which stay this one's own.
            patience_s: how long the other side may take to make room for it.

        Raises:
            PeerLost: the other process is gone.
            CommTimeout: it takes nothing.
            ResourceError: this process may have no more descriptors under way.
        """
        frame = memoryview(pack({**message, "files": len(files)} if files else message))
        self._link.settimeout(patience_s)
        try:
            for first in range(0, len(files), _FILES_AT_ONCE):
                socket.send_fds(self._link, [frame[:1]], list(files[first : first + _FILES_AT_ONCE]))
                frame = frame[1:]
            self._link.sendall(frame)
        except TimeoutError:
            raise self._late(patience_s) from None
        except OSError as error:
            if isinstance(error, ConnectionError) or self._link.fileno() < 0:
                raise self.lost() from None
            raise ResourceError(
                f"[comm.channel] descriptors must be handed to {self.peer}; got {error.strerror!r}; raise the limit of "
                "open files (ulimit -n)"
            ) from None

    def receive(self, patience_s: float | None = None) -> tuple[Message, list[int]]:
        """The next message and its descriptors, which are the caller's to close.

        Args:
            patience_s: how long it may take; None: for ever.

        Raises:
            PeerLost: the other process is gone, or what came is no message.
            CommTimeout: nothing came.
        """
        until = None if patience_s is None else time.monotonic() + patience_s
        while (body := self._frame()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise self._late(patience_s or 0.0)
            if self._wait(left):
                self._read()
        try:
            message = unpack(body)
        except ValueError:
            message = None
        count = message.get("files", 0) if type(message) is dict else -1
        if type(count) is not int or not 0 <= count <= len(self._files):
            raise self._odd("a frame that is no message")
        return message, [self._files.popleft() for _ in range(count)]

    @property
    def is_between_messages(self) -> bool:
        """Whether nothing of another message has come."""
        return not self._left

    def _frame(self) -> bytearray | None:
        """The next frame's body, once it is whole."""
        if len(self._left) < HEAD.size:
            return None
        end = HEAD.size + HEAD.unpack_from(self._left)[0]
        if end > MOST_BYTES:
            raise self._odd(f"a frame of {end:,} bytes")
        if len(self._left) < end:
            return None
        body = self._left[HEAD.size : end]
        del self._left[:end]
        return body

    def _wait(self, patience_s: float | None) -> bool:
        """Whether something came in time."""
        if self._link.fileno() < 0:
            raise self.lost()
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        if self._ended >= 0:
            poll.register(self._ended, select.POLLIN)
        found = dict(poll.poll(None if patience_s is None else max(1, int(patience_s * 1000))))
        if found and self._link.fileno() not in found:
            raise self.lost()  # it has ended, and left nothing unread
        return bool(found)

    def _read(self) -> None:
        try:
            piece, extra, flags, _ = self._link.recvmsg(_PIECE, _SPACE, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            raise self.lost() from None
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
                self._files.extend(files)
        if flags & socket.MSG_CTRUNC:
            raise ResourceError(
                f"[comm.channel] descriptors of {self.peer} must be taken; got fewer than it sent; raise the limit of "
                "open files (ulimit -n)"
            )
        if not piece:
            raise self.lost()
        self._left += piece

    def lost(self) -> PeerLost:
        """The error of a peer that is gone."""
        return PeerLost(
            f"[comm.channel] processes must live as long as their group; got the end of {self.peer}; see what it "
            "printed, and whether memory is short"
        )

    def _odd(self, what: str) -> CommError:
        return PeerLost(
            f"[comm.channel] processes of a group must speak as this version does; got {what} from {self.peer}; start "
            "the group again"
        )

    def _late(self, patience_s: float) -> CommTimeout:
        return CommTimeout(
            f"[comm.channel] processes of a group must answer; got nothing from {self.peer} for {patience_s:g} s; see "
            "whether it is stopped, or the machine has more to do than it can"
        )

    def shut(self) -> None:
        """End the connection from any thread; one that waits in `receive` finds the peer lost."""
        with suppress(OSError):  # the peer has ended it
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket, and of descriptors that belong to no message."""
        self._link.close()
        while self._files:
            with suppress(OSError):
                os.close(self._files.popleft())
