"""Messages between a group's processes: whole, in order, with their descriptors; and what is no message."""

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
    """Two ends, each of which knows the other's name."""
    left, right = socket.socketpair()
    pair = Channel(left, "process 1"), Channel(right, "the leader")
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def opened():
    """Descriptors of files that hold their number."""
    found = []
    for number in range(600):
        found.append(os.memfd_create(f"file-{number}"))
        os.write(found[-1], str(number).encode())
    yield found
    for descriptor in found:
        os.close(descriptor)


def num_open():
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def test_messages_arrive_whole_and_in_order(ends):
    """Small and large ones, written at once."""
    sent = [{"number": n, "text": "é" * n} for n in (0, 1, 100_000, 7, 1_000_000)]
    writer = threading.Thread(target=lambda: [ends[0].send(message) for message in sent])
    writer.start()
    assert [ends[1].receive(60)[0] for _ in sent] == sent
    writer.join()


def test_descriptors_come_with_their_message(ends, opened):
    """More than the system takes at once; messages without any between them; not inherited by programs."""
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


def test_a_peer_that_is_gone(ends):
    """Is named, by reading and by writing; what it said before is read."""
    ends[0].send({"last": True})
    ends[0].close()
    assert ends[1].receive(60)[0] == {"last": True}
    for call in (lambda: ends[1].receive(60), lambda: ends[1].send({})):
        with pytest.raises(PeerLost, match="got the end of the leader"):
            call()


def test_a_peer_that_has_ended_while_another_holds_its_end():
    """Its process says so, where the socket does not."""
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


def test_a_peer_that_is_late():
    """An error in time; what has come of a message stays."""
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
def test_what_is_no_message(name):
    """Is refused as the end of a peer that cannot be relied on."""
    left, right = socket.socketpair()
    channel = Channel(left, "process 1")
    right.sendall(NO_MESSAGES[name])
    with pytest.raises(PeerLost, match=r"got a frame .* from process 1"):
        channel.receive(60)
    channel.close()
    right.close()


def test_descriptors_of_no_message_are_closed(opened):
    """Whatever comes, nothing is left open."""
    before = num_open()
    left, right = socket.socketpair()
    channel = Channel(left, "process 1")
    socket.send_fds(right, [pack({"none": 0})], opened[:5])
    assert channel.receive(60) == ({"none": 0}, []) and num_open() == before + 2 + 5
    channel.close()
    right.close()
    assert num_open() == before
