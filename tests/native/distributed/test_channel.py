"""Messages between processes of a group: complete, in order, with descriptors; and rejected input."""

import os
import socket
import threading
import time

import pytest

from tilewise.comm.channel import Channel
from tilewise.core import CommTimeout, PeerLost
from tilewise.processes.children import HEAD, pack

NO_MESSAGES = {
    "no JSON": HEAD.pack(3) + b"{]}",
    "no text": HEAD.pack(2) + b"\xff\xfe",
    "no object": pack([1]),
    "a truth value": pack({"files": True}),
    "descriptors that did not come": pack({"files": 1}),
    "fewer than none": pack({"files": -1}),
    "too long a frame": HEAD.pack((1 << 32) - 1),
}


@pytest.fixture
def ends():
    """Two ends, each with the other's name."""
    left, right = socket.socketpair()
    pair = Channel(left, "process 1"), Channel(right, "the leader")
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def opened():
    """Descriptors of files that contain their number."""
    descriptors = []
    for number in range(600):
        descriptors.append(os.memfd_create(f"file-{number}"))
        os.write(descriptors[-1], str(number).encode())
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def num_open():
    """Number of descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def test_messages_arrive_complete_and_in_order(ends):
    """Small and large messages, written without waiting."""
    sent = [{"number": n, "text": "é" * n} for n in (0, 1, 100_000, 7, 1_000_000)]
    writer = threading.Thread(target=lambda: [ends[0].send(message) for message in sent])
    writer.start()
    assert [ends[1].receive(60)[0] for _ in sent] == sent
    writer.join()


def test_descriptors_come_with_their_message(ends, opened):
    """More descriptors than one system call takes; messages without descriptors in between;
    descriptors are not inherited.
    """
    ends[0].send({"a": 1}, opened[:2])
    ends[0].send({"b": 2})
    ends[0].send({"c": 3}, opened[2:])
    got = [ends[1].receive(60) for _ in range(3)]
    assert [len(files) for _, files in got] == [2, 0, 598]
    files = [file for _, some in got for file in some]
    assert [os.pread(file, 9, 0) for file in files] == [str(n).encode() for n in range(600)]
    assert not any(map(os.get_inheritable, files))
    for file in files:
        os.close(file)


def test_a_closed_peer_is_named(ends):
    """By reading and by writing; messages sent before are still read."""
    ends[0].send({"last": True})
    ends[0].close()
    assert ends[1].receive(60)[0] == {"last": True}
    for call in (lambda: ends[1].receive(60), lambda: ends[1].send({})):
        with pytest.raises(PeerLost, match="got the end of the leader"):
            call()


def test_an_ended_peer_whose_socket_is_still_open():
    """The end of the process is detected although another process has its socket open."""
    left, right = socket.socketpair()
    ended, ending = os.pipe()
    channel = Channel(left, "process 1", ended)
    right.sendall(pack({"last": True}))
    os.close(ending)
    assert channel.receive(60)[0] == {"last": True}
    with pytest.raises(PeerLost, match="process 1"):
        channel.receive(60)
    channel.close()
    right.close()
    os.close(ended)


def test_a_late_peer():
    """A timeout is an error; the received part of a message remains."""
    left, right = socket.socketpair()
    channel = Channel(left, "process 1")
    frame = pack({"whole": 1})
    right.sendall(frame[:7])
    begin = time.monotonic()
    with pytest.raises(CommTimeout, match=r"nothing from process 1 for 0\.1 s"):
        channel.receive(0.1)
    assert time.monotonic() - begin < 5
    right.sendall(frame[7:])
    assert channel.receive(60)[0] == {"whole": 1}
    with pytest.raises(CommTimeout):
        channel.send({"large": "x" * (1 << 22)}, patience_s=0.1)
    channel.close()
    right.close()


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_invalid_messages(name):
    """They are rejected as the end of an unreliable peer."""
    left, right = socket.socketpair()
    channel = Channel(left, "process 1")
    right.sendall(NO_MESSAGES[name])
    with pytest.raises(PeerLost, match=r"got a frame .* from process 1"):
        channel.receive(60)
    channel.close()
    right.close()


def test_descriptors_of_invalid_messages_are_closed(opened):
    """No descriptor stays open."""
    before = num_open()
    left, right = socket.socketpair()
    channel = Channel(left, "process 1")
    socket.send_fds(right, [pack({"none": 0})], opened[:5])
    assert channel.receive(60) == ({"none": 0}, []) and num_open() == before + 2 + 5
    channel.close()
    right.close()
    assert num_open() == before
