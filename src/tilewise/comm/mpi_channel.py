"""`MpiChannel`: messages between a group's leader and one of its workers, over MPI.

It replaces `comm.channel` for processes that a launcher started. MPI cannot transfer descriptors.
To a process of the same host, the path of the descriptor is sent, and the receiver opens it. To a
process of another host, a copy of the content is sent, which is correct only for content that never
changes.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tilewise._native.connection import World
from tilewise.comm.channel import Message
from tilewise.comm.memory import content_of, shared_content
from tilewise.core.errors import CommTimeout, PeerLost, ResourceError
from tilewise.core.validation import shown
from tilewise.processes.children import HEAD, pack, unpack

__all__ = ["MpiChannel"]

_SLICE_S = 0.2
_QUIET_S = 10.0  # a process of another host is lost after this silence
_PIECE = 1 << 26
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class MpiChannel:
    """One end of a channel. One thread at a time may send, and one may receive.

    Args:
        world: the world of all processes.
        number: number of the process at the other end.
        peer: description of the process at the other end, for messages.

    Attributes:
        is_local: whether the process at the other end is on this host.
    """

    def __init__(self, world: World, number: int, peer: str) -> None:
        self.peer, self.is_local = peer, False
        self._world, self._number, self._ended = world, number, -1

    def watch(self, ended: int) -> None:
        """Detect by a descriptor that the other process has ended. The caller closes the
        descriptor. With -1, the end is detected only because no message arrives in time.
        """
        self._ended = ended
        self.is_local = ended >= 0

    def send(self, message: Message, files: Sequence[int | str] = (), patience_s: float = 60.0) -> None:
        """Send one message.

        Args:
            message: plain values.
            files: descriptors of this process, paths of descriptors of other processes, or -1 for
                none.
            patience_s: how long the other side may take to receive the message.

        Raises:
            PeerLost: the other process has ended.
            CommTimeout: the other process does not receive.
        """
        copies, paths = list[bytes](), list[str | int]()
        for file in files:
            if isinstance(file, str) or file < 0:
                paths.append(file if isinstance(file, str) else "")
            elif self.is_local:
                paths.append(f"/proc/{os.getpid()}/fd/{file}")
            else:
                copies.append(content_of(file))
                paths.append(len(copies[-1]))
        self._send(pack({**message, "paths": paths} if files else message), patience_s)
        for copy in copies:
            for begin in range(0, len(copy), _PIECE):
                self._send(copy[begin : begin + _PIECE], patience_s)

    def _send(self, frame: bytes, patience_s: float) -> None:
        if not self._world.send_frame(self._number, frame, patience_s):
            raise self.lost() if self._is_gone() else self._late(patience_s)

    def receive(self, patience_s: float | None = None) -> tuple[Message, list[int]]:
        """The next message and its descriptors, which the caller must close; -1 stands for none.

        Args:
            patience_s: how long the call may wait; None for no limit.

        Raises:
            PeerLost: the other process has ended, or sent an invalid message.
            CommTimeout: nothing arrived.
            ResourceError: a file that the message names cannot be opened.
        """
        frame = self._receive(patience_s)
        message: Any = None
        if len(frame) >= HEAD.size and HEAD.unpack_from(frame)[0] == len(frame) - HEAD.size:
            with suppress(ValueError):
                message = unpack(frame[HEAD.size :])
        paths = message.get("paths", []) if type(message) is dict else None
        if not isinstance(paths, list) or any(type(path) not in (str, int) for path in paths):
            raise self._invalid()
        files = list[int]()
        try:
            for path in paths:
                files.append(self._copy(path) if isinstance(path, int) else _opened(path, self.peer))
        except BaseException:
            for file in files:
                if file >= 0:
                    os.close(file)
            raise
        return message, files

    def _copy(self, num_bytes: int) -> int:
        """Memory with the content that the other process sends next."""
        content = bytearray()
        while len(content) < num_bytes and (piece := self._receive(_QUIET_S)):
            content += piece
        if len(content) != num_bytes:
            raise self._invalid()
        return shared_content(bytes(content), "copy")

    def _receive(self, patience_s: float | None) -> bytes:
        until = None if patience_s is None else time.monotonic() + patience_s
        while True:
            left = _SLICE_S if until is None else min(_SLICE_S, until - time.monotonic())
            if (frame := self._world.receive_frame(self._number, max(left, 0.0))) is not None:
                return frame
            if self._is_gone():
                raise self.lost()
            if left <= 0:
                raise self._late(patience_s or 0.0)

    def _is_gone(self) -> bool:
        if self._world.cause:
            return True
        if self._ended < 0:
            return self._world.quiet_s(self._number) > _QUIET_S
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        return bool(poll.poll(0))

    def lost(self) -> PeerLost:
        """The error about a peer that has ended."""
        how = self._world.cause or ("its end" if self._ended >= 0 else f"nothing of it for {_QUIET_S:g} s")
        return PeerLost(
            f"[comm.channel] processes must live as long as their group; got {how} ({self.peer}); see what it printed, "
            "and whether its host can be reached"
        )

    def _invalid(self) -> PeerLost:
        return PeerLost(
            f"[comm.channel] processes of a group must send valid messages; got something else from "
            f"{self.peer}; start all again"
        )

    def _late(self, patience_s: float) -> CommTimeout:
        return CommTimeout(
            f"[comm.channel] processes of a group must answer; got nothing from {self.peer} for {patience_s:g} s; see "
            "whether it is stopped, or the machine is overloaded"
        )

    def close(self) -> None:
        """Does nothing, because the world stays open."""


def _opened(path: str, peer: str) -> int:
    if not path:
        return -1
    if _PATH.fullmatch(path) is None:
        raise PeerLost(
            f"[comm.channel] the path of shared memory must be a descriptor of a process; got {shown(path)} from "
            f"{peer}; start all again"
        )
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(
            f"[comm.channel] memory of {peer} must be opened by the processes of its host; got {error.strerror!r} for "
            f"{path}; run them as one user, in one container"
        ) from None
