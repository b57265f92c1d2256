"""One of two processes under mpiexec that use the table of native/comm/mpi: `mpi_ranks.py CASE
TABLE [LIBRARY]`.

Each case is a function over the table. Both processes run it and exit with status 0 if every check
passed. `planted-CASE` is the same with a second process that sends wrong bytes. The cases world,
guest and single need no second process.
"""

import ctypes
import sys
import time
from ctypes import byref, c_int32, c_int64
from pathlib import Path

from tilewise.comm.launcher import launched, require_world
from tilewise.comm.mpi_table import load_table, name_of_library
from tilewise.comm.world import _unlink_segments
from tilewise.core import ConfigError

WAIT_S = 20
THREAD_SINGLE, THREAD_MULTIPLE = 0, 4096  # by the standard interface
TAG, OTHER_TAG = 3, 4


class Rank:
    """The started table, with Python buffers."""

    def __init__(self, table):
        self.table = table
        self.own = table.self

    def call(self, name, *arguments):
        error = getattr(self.table, name)(self.own, *arguments)
        assert error == 0, f"{name}: {self.describe(error)}"

    def describe(self, error):
        text = ctypes.create_string_buffer(400)
        self.table.describe(self.own, error, text, len(text))
        return text.value.decode()

    def begin(self, name, *arguments):
        request = ctypes.create_string_buffer(8)
        self.call(name, *arguments, request)
        return request

    def test(self, request):
        is_done, num_bytes = c_int32(-1), c_int64(-1)
        error = self.table.test(self.own, request, byref(is_done), byref(num_bytes))
        return error, is_done.value, num_bytes.value

    def end(self, request):
        """Wait for a request; returns the last result of `test`."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            error, is_done, num_bytes = self.test(request)
            if error or is_done:
                return error, num_bytes
        raise AssertionError("a message must arrive")

    def find(self, tag):
        """Wait for a message; returns its sender and bytes."""
        is_found, sender, num_bytes = c_int32(-1), c_int32(-1), c_int64(-1)
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            self.call("probe", tag, byref(is_found), byref(sender), byref(num_bytes))
            if is_found.value:
                return sender.value, num_bytes.value
        raise AssertionError("a message must come")

    def take(self, sender, num_bytes, tag):
        """Receive a message that was found."""
        room = ctypes.create_string_buffer(max(num_bytes, 1))
        self.call("take", room, num_bytes, sender, tag)
        return room.raw[:num_bytes]


def messages(rank, me, peer):
    """Small and large messages in both directions, into a posted buffer and by probe and receive."""
    for num_bytes in (0, 1, 5000, 3_000_000):
        data = bytes([me + 1]) * num_bytes
        room = ctypes.create_string_buffer(num_bytes + 8)
        receiving = rank.begin("receive", room, num_bytes + 8, peer, TAG)
        sending = rank.begin("send", data, num_bytes, peer, TAG)
        assert rank.end(receiving) == (0, num_bytes)
        assert room.raw == bytes([peer + 1]) * num_bytes + bytes(8)
        assert rank.end(sending)[0] == 0
        assert rank.test(sending)[:2] == (0, 1)  # a done one is gone
        sending = rank.begin("send", data, num_bytes, peer, OTHER_TAG)
        assert rank.find(OTHER_TAG) == (peer, num_bytes)
        assert rank.take(peer, num_bytes, OTHER_TAG) == bytes([peer + 1]) * num_bytes
        assert rank.end(sending)[0] == 0


def order(rank, me, peer):
    """Messages of one tag arrive in the order of their start, independent of another tag."""
    texts = [b"%d" % index for index in range(100)]  # kept until all is sent
    requests = [rank.begin("send", text, len(text), peer, tag) for text in texts for tag in (TAG, OTHER_TAG)]
    for tag in (OTHER_TAG, TAG):
        assert [rank.take(*rank.find(tag), tag) for _ in texts] == texts
    assert [rank.end(request)[0] for request in requests] == [0] * 200


def errors(rank, me, peer):
    """Errors have texts and the process continues: a too small buffer, no such process or tag."""
    tag_max = rank.table.tag_max(rank.own)
    assert tag_max >= 32767
    request = ctypes.create_string_buffer(8)
    for wrong in ((8, 2, TAG), (8, -1, TAG), (8, -3, TAG), (8, peer, -1), (-1, peer, TAG)):
        for name in ("send", "receive"):
            error = getattr(rank.table, name)(rank.own, ctypes.create_string_buffer(8), *wrong, request)
            assert rank.describe(error) == "invalid process, tag or size"
        assert rank.table.take(rank.own, ctypes.create_string_buffer(8), *wrong) == error
    if tag_max < 2**31 - 1:
        assert rank.table.send(rank.own, b"", 0, peer, tag_max + 1, request) == error
    assert "2 GiB" in rank.describe(rank.table.send(rank.own, b"", 2**31, peer, TAG, request))
    assert "already" in rank.describe(rank.table.start(rank.own))
    assert "error 123456" not in rank.describe(0)
    room = ctypes.create_string_buffer(16)
    receiving = rank.begin("receive", room, 4, peer, TAG)
    sending = rank.begin("send", b"12345678", 8, peer, TAG)
    error, _ = rank.end(receiving)
    assert error > 0 and "trunc" in rank.describe(error).lower(), rank.describe(error)
    assert room.raw[4:] == bytes(12)
    rank.end(sending)
    messages(rank, me, peer)


def edges(rank, me, peer):
    """The largest tag works; a receive without a message is not done."""
    tag_max = rank.table.tag_max(rank.own)
    room = ctypes.create_string_buffer(1)
    waiting = rank.begin("receive", room, 1, peer, TAG)
    assert rank.test(waiting) == (0, 0, 0)
    sending = rank.begin("send", b"x", 1, peer, tag_max)
    assert rank.take(*rank.find(tag_max), tag_max) == b"x"
    assert rank.end(sending)[0] == 0
    last = rank.begin("send", b"y", 1, peer, TAG)
    assert rank.end(waiting) == (0, 1) and room.raw == b"y"
    assert rank.end(last)[0] == 0


def world(rank, library):
    """Whether launcher and MPI agree about this process."""
    rank.call("start")
    try:
        require_world(launched(), rank.table.rank(rank.own), rank.table.size(rank.own), "the MPI of a test")
        print("they agree\n", end="", flush=True)
    except ConfigError as error:
        print(error)
    rank.call("finish")


def guest(rank, library):
    """MPI that is already initialized is used and not finalized."""
    provided, is_over = c_int32(), c_int32(-1)
    library.MPI_Init_thread(None, None, THREAD_MULTIPLE, byref(provided))
    assert provided.value == THREAD_MULTIPLE
    rank.call("start")
    rank.call("finish")
    library.MPI_Finalized(byref(is_over))
    assert is_over.value == 0
    library.MPI_Finalize()
    print("left running")


def single(rank, library):
    """MPI with single-thread support is rejected."""
    provided = c_int32(-1)
    library.MPI_Init_thread(None, None, THREAD_SINGLE, byref(provided))
    assert provided.value == THREAD_SINGLE
    print(rank.describe(rank.table.start(rank.own)))
    library.MPI_Finalize()


class FaultyRank(Rank):
    """Changes the first byte of every message; each case must detect it."""

    def begin(self, name, data, num_bytes, *where):
        if name == "send" and num_bytes:
            self.changed = [*getattr(self, "changed", ()), bytes([data[0] ^ 1]) + data[1:]]
            data = self.changed[-1]
        return super().begin(name, data, num_bytes, *where)


def main():
    """Start, run the case, finish; calls before and after are rejected."""
    case, table = sys.argv[1], load_table(Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
    rank = Rank(table)
    if case in ("world", "guest", "single"):
        globals()[case](rank, ctypes.CDLL(sys.argv[3]) if sys.argv[3:] else None)
        return
    name = name_of_library(table)
    assert name and "\n" not in name and "  " not in name
    assert "not started" in rank.describe(
        table.send(table.self, b"", 0, 0, 0, ctypes.create_string_buffer(8))
    )
    assert "error 123456 of MPI" in rank.describe(123456)
    rank.call("start")
    _unlink_segments()  # a planted error ends the process without MPI's end
    me, size = table.rank(table.self), table.size(table.self)
    assert size == 2 and me in (0, 1)
    if case.startswith("planted-") and me == 1:
        rank = FaultyRank(table)
    for name in ("messages", "order", "errors", "edges") if case == "all" else (case.split("-")[-1],):
        globals()[name](rank, me, 1 - me)
    rank.call("finish")
    assert "not started" in rank.describe(table.finish(table.self))
    assert "cannot start again" in rank.describe(table.start(table.self))
    print(f"rank {me} of {size} is done\n", end="", flush=True)  # one write: the other's come between


if __name__ == "__main__":
    main()
