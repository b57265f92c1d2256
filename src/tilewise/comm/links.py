"""How fast processes that a launcher has started reach each other: messages between the leader and each worker, through
the same wire as tiles.

A message here passes Python twice, so `round_trip_s` is more than tiles need. `busy_bytes_per_s` is what is left of the
bandwidth while the worker's cores compute: MPI moves nothing by itself, and what is lost there is lost in training.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tilewise.comm.channel import Message
from tilewise.comm.peer import JoinedPeer
from tilewise.comm.wire_channel import WireChannel

__all__ = ["MOST_QUESTIONS", "Link", "measure_link", "take_bytes"]

_ROUND_TRIPS = 50
MOST_QUESTIONS = _ROUND_TRIPS + 2
_FRAME, _FRAMES = 16 << 20, 8
_SIDE = 512  # of matrices that keep a core busy


@dataclass(frozen=True)
class Link:
    """From the leader to a worker.

    Attributes:
        process: the worker's number.
        host: its host's number; the leader's is 0.
        round_trip_s: a small message there and its answer back, median.
        bytes_per_s: of large messages, while the worker waits for them.
        busy_bytes_per_s: while its cores compute.
    """

    process: int
    host: int
    round_trip_s: float
    bytes_per_s: float
    busy_bytes_per_s: float


def measure_link(peer: JoinedPeer, host: int, number: int) -> Link:
    """Measure one, some seconds long. Nothing else may be under way.

    Args:
        peer: the worker.
        host: its host's number.
        number: of the first question; each is one more.

    Raises:
        PeerLost, CommTimeout: it is gone, or does not answer.
    """

    def asked(count: int, size: int, is_busy: bool) -> float:
        nonlocal number
        content = bytes(size)
        started = time.perf_counter()
        peer.ask({"id": number, "what": "take", "count": count, "is_busy": is_busy})
        for _ in range(count):
            peer.channel.send_bytes(content)  # type: ignore[union-attr]
        peer.answer(60.0)
        number += 1
        return time.perf_counter() - started

    trips = [asked(0, 0, False) for _ in range(_ROUND_TRIPS)]
    idle, busy = (_FRAME * _FRAMES / asked(_FRAMES, _FRAME, is_busy) for is_busy in (False, True))
    return Link(peer.number, host, statistics.median(trips), idle, busy)


def take_bytes(channel: WireChannel, message: Message) -> int:
    """In a worker: all that one question of `measure_link` sends; how many bytes that were."""
    with _computing(bool(message["is_busy"])):
        return sum(len(channel.receive_bytes()) for _ in range(int(message["count"])))


@contextmanager
def _computing(is_busy: bool) -> Iterator[None]:
    """A block during which another thread multiplies matrices."""
    is_over = threading.Event()

    def compute() -> None:
        matrix = np.ones((_SIDE, _SIDE), np.float32)
        while not is_over.is_set():
            np.matmul(matrix, matrix)

    thread = threading.Thread(target=compute, daemon=True)
    if is_busy:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if is_busy:
            thread.join()
