"""Messages over MPI's connection: paths and copies replace descriptors; and rejected input."""

import os
from collections import deque

import pytest

from tilewise.comm.mpi_channel import MpiChannel
from tilewise.core import PeerLost
from tilewise.processes.children import HEAD, pack

NO_MESSAGES = {
    "nothing": [b""],
    "less than a head": [b"\x00\x00"],
    "another length": [HEAD.pack(3) + b"{}"],
    "no JSON": [HEAD.pack(3) + b"{]}"],
    "no object": [pack([1])],
    "no list of paths": [pack({"paths": 5})],
    "a truth value": [pack({"paths": [True]})],
    "a file of another kind": [pack({"paths": ["/proc/1/fd/../../etc/passwd"]})],
    "fewer bytes than none": [pack({"paths": [-1]})],
    "more bytes than were said": [pack({"paths": [2]}), b"abc"],
    "copies without an end": [pack({"paths": [1 << 60]}), b"", b""],
}


class FakeWorld:
    """Frames that one end sends and the other receives, until none is left."""

    def __init__(self, frames=()):
        self.frames, self.cause = deque(frames), ""

    def send_frame(self, to, frame, limit_s):
        """Store a frame."""
        self.frames.append(frame)
        return True

    def receive_frame(self, source, limit_s):
        """The next frame; None at the end."""
        if self.frames:
            return self.frames.popleft()
        self.cause = "the end"
        return None


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_invalid_messages(name):
    """They are rejected, and no descriptor stays open."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PeerLost, match=r"must send valid messages|must be a descriptor of a process"):
        MpiChannel(FakeWorld(NO_MESSAGES[name]), 1, "process 1").receive(5.0)
    assert os.listdir("/proc/self/fd") == before


def test_descriptors_come_with_their_message():
    """Files arrive as copies, as from another host; an absent file is -1."""
    own = os.memfd_create("file")
    os.write(own, b"content")
    channel = MpiChannel(FakeWorld(), 1, "process 1")
    channel.send({"what": "open"}, [own, -1, ""])
    message, files = channel.receive(5.0)
    assert message["what"] == "open" and files[1:] == [-1, -1]
    assert os.pread(files[0], 100, 0) == b"content"
    for file in (own, files[0]):
        os.close(file)
