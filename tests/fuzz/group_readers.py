"""The reader of what processes of a group say to each other, whole messages with what is in them.

As in readers.py, whose table it is part of.
"""

from __future__ import annotations

import socket
from pathlib import Path

from tilewise.comm.channel import Channel
from tilewise.comm.facts import own_facts, require_equal
from tilewise.comm.peer import error_of
from tilewise.core import PeerLost, TilewiseError
from tilewise.core.frames import pack


def read_messages(folder: Path, data: bytes) -> None:
    """A stream is messages to its end, facts that are compared and errors that can be raised, or is refused."""
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


def valid_messages() -> list[bytes]:
    """What a worker says: who it is, answers, errors, signs of life."""
    hello = pack({**own_facts(), "pid": 7})
    answers = [
        {"id": 1, "answer": None},
        {"id": 2, "answer": {"runs": 1, "tasks": 2}},
        {"beat": True},
        {"id": 3, "answer": [[0, 1, "linear", 0, 1, 2, 3, 4]]},
        {"id": 4, "error": ["PlanError", "[session.assemble] no"]},
    ]
    return [hello, b"".join(map(pack, answers)), hello + pack(answers[4])]
