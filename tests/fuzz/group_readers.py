"""The reader of messages between processes of a group.

Part of the table in readers.py.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tilewise.comm.channel import Channel
from tilewise.comm.facts import own_facts, require_equal
from tilewise.comm.mpi_channel import MpiChannel
from tilewise.comm.peer import error_of
from tilewise.core import PeerLost, TilewiseError
from tilewise.processes.children import HEAD, pack


def read_messages(folder: Path, data: bytes) -> None:
    """A stream has messages, facts to compare and errors to raise until its end, or is rejected."""
    left, right = socket.socketpair()
    channel = Channel(left, "process 1")
    try:
        with right:
            right.setblocking(False)
            sent = right.send(data) if data else 0
        assert sent == len(data)
        while True:
            try:
                message, files = channel.receive(5.0)
            except PeerLost as error:
                if "got the end of" in str(error) and channel.is_between_messages:
                    return
                raise
            assert files == []
            if "error" in message:
                assert isinstance(error_of(message["error"]), TilewiseError)
            if "version" in message:
                require_equal(own_facts(), message, "process 1")
    finally:
        channel.close()


class Frames:
    """A connection's frames, one after another, then its end."""

    cause = ""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def receive_frame(self, source: int, limit_s: float) -> bytes | None:
        """The next frame, with the length that its first bytes give."""
        if not self.left:
            self.cause = "the end"
            return None
        size = HEAD.size + int.from_bytes(self.left[: HEAD.size], "big")
        frame, self.left = self.left[:size], self.left[size:]
        return frame


def read_frames(folder: Path, data: bytes) -> None:
    """The same over MPI, where paths replace descriptors; only paths of the group's processes may be opened."""
    channel = MpiChannel(Frames(data), 1, "process 1")  # type: ignore[arg-type]
    while True:
        try:
            _, files = channel.receive(5.0)
        except PeerLost as error:
            if "got the end" in str(error):
                return
            raise
        for file in files:
            if file >= 0:
                os.close(file)


def valid_frames() -> list[bytes]:
    """A program that is copied, memory that is not, and questions."""
    own = os.open("/dev/null", os.O_RDWR)  # stays open with the tests
    paths = [5, "", f"/proc/{os.getpid()}/fd/{own}"]
    questions = [{"id": 1, "what": "open", "executor": 1, "arguments": [{"num_devices": 2}], "paths": paths}]
    copied = HEAD.pack(1) + b"x"  # a frame of five bytes, all of which are the copy
    return [pack({"id": 2, "what": "stats", "executor": 1, "arguments": []}), pack(questions[0]) + copied]


def valid_messages() -> list[bytes]:
    """Messages of a worker: its facts, answers, errors, signs of life."""
    hello = pack({**own_facts(), "pid": 7})
    answers = [
        {"id": 1, "answer": None},
        {"id": 2, "answer": {"runs": 1, "tasks": 2}},
        {"beat": True},
        {"id": 3, "answer": [[0, 1, "linear", 0, 1, 2, 3, 4]]},
        {"id": 4, "error": ["PlanError", "[session.assemble] no"]},
    ]
    return [hello, b"".join(map(pack, answers)), hello + pack(answers[4])]
