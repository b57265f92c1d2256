"""`Channel`: messages between a group's leader and one of its workers, over one end of a socket
pair.

A message is a frame with a JSON object (`processes.children`). It may carry file descriptors, whose
number is the entry `files` of the object. Nothing is pickled, and the receiver checks every
message. Descriptors are sent with the first bytes of their frame, so they have arrived when the
frame is complete. If a call is interrupted or times out, the bytes already read are kept and the
next call continues there.
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
from tilewise.processes.children import HEAD, MOST_BYTES, pack, unpack

__all__ = ["Channel", "Message"]

Message = dict[str, Any]
_FILES_AT_ONCE = 250  # Linux allows 253
_PIECE = 1 << 16
_SPACE = socket.CMSG_SPACE(_FILES_AT_ONCE * array.array("i").itemsize)


class Channel:
    """One end of a channel. One thread at a time may send, and one may receive.

    Args:
        link: the socket. It is closed with this object.
        peer: description of the other end, for messages.
        ended: a descriptor that becomes readable when the other process has ended; -1 for none. It
            is needed if a third process may still have the socket's other end open. The caller
            closes it.
    """

    def __init__(self, link: socket.socket, peer: str, ended: int = -1) -> None:
        self.peer = peer
        self._link, self._ended = link, ended
        self._left, self._files = bytearray(), deque[int]()

    @classmethod
    def of(cls, descriptor: int, peer: str) -> Channel:
        """The end whose socket this process has inherited under a descriptor number."""
        return cls(socket.socket(fileno=descriptor), peer)

    def watch(self, ended: int) -> None:
        """Also detect by a descriptor that the other process has ended. The caller closes the
        descriptor.
        """
        self._ended = ended

    def send(self, message: Message, files: Sequence[int] = (), patience_s: float = 60.0) -> None:
        """Send one message.

        Args:
            message: plain values.
            files: descriptors to send. The other process gets duplicates.
            patience_s: how long the other side may take to make room for the message.

        Raises:
            PeerLost: the other process has ended.
            CommTimeout: the other process does not read.
            ResourceError: too many descriptors of this process are in flight.
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
                f"[comm.channel] descriptors must be sent to {self.peer}; got {error.strerror!r}; raise the limit of "
                "open files (ulimit -n)"
            ) from None

    def receive(self, patience_s: float | None = None) -> tuple[Message, list[int]]:
        """The next message and its descriptors, which the caller must close.

        Args:
            patience_s: how long the call may wait; None for no limit.

        Raises:
            PeerLost: the other process has ended, or sent an invalid message.
            CommTimeout: nothing arrived.
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
            raise self._invalid("a frame that is no message")
        return message, [self._files.popleft() for _ in range(count)]

    @property
    def is_between_messages(self) -> bool:
        """Whether no part of the next message has arrived."""
        return not self._left

    def _frame(self) -> bytearray | None:
        """The next frame's body; None if the frame is not complete yet."""
        if len(self._left) < HEAD.size:
            return None
        end = HEAD.size + HEAD.unpack_from(self._left)[0]
        if end > MOST_BYTES:
            raise self._invalid(f"a frame of {end:,} bytes")
        if len(self._left) < end:
            return None
        body = self._left[HEAD.size : end]
        del self._left[:end]
        return body

    def _wait(self, patience_s: float | None) -> bool:
        """Whether something arrived in time."""
        if self._link.fileno() < 0:
            raise self.lost()
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        if self._ended >= 0:
            poll.register(self._ended, select.POLLIN)
        events = dict(poll.poll(None if patience_s is None else max(1, int(patience_s * 1000))))
        if events and self._link.fileno() not in events:
            raise self.lost()  # the process has ended, and nothing is left to read
        return bool(events)

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
                f"[comm.channel] descriptors of {self.peer} must be received; got fewer than it sent; raise the "
                "limit of open files (ulimit -n)"
            )
        if not piece:
            raise self.lost()
        self._left += piece

    def lost(self) -> PeerLost:
        """The error about a peer that has ended."""
        return PeerLost(
            f"[comm.channel] processes must live as long as their group; got the end of {self.peer}; see what it "
            "printed, and whether memory is short"
        )

    def _invalid(self, what: str) -> CommError:
        return PeerLost(
            f"[comm.channel] processes of a group must send valid messages; got {what} from {self.peer}; start "
            "the group again"
        )

    def _late(self, patience_s: float) -> CommTimeout:
        return CommTimeout(
            f"[comm.channel] processes of a group must answer; got nothing from {self.peer} for {patience_s:g} s; see "
            "whether it is stopped, or the machine is overloaded"
        )

    def shut(self) -> None:
        """End the connection. Any thread may call it. A thread that waits in `receive` gets
        PeerLost.
        """
        with suppress(OSError):  # the peer may have closed it
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and received descriptors that `receive` has not returned."""
        self._link.close()
        while self._files:
            with suppress(OSError):
                os.close(self._files.popleft())
